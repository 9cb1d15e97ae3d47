/* Ranks that are threads of one program: where they meet, and what every example needs. With MPI the meeting would be
 * MPI_Allgather, and each rank a process. */
#ifndef THREAD_RANKS_H_
#define THREAD_RANKS_H_

#define _POSIX_C_SOURCE 200809L
#include <errno.h>
#include <nccl_ep.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { NUM_RANKS = 4 };

#define CHECK(call)                                  \
  do {                                               \
    if ((call) != NCCL_EP_SUCCESS) {                 \
      fprintf(stderr, "%s\n", ncclEpGetLastError()); \
      exit(1);                                       \
    }                                                \
  } while (0)

typedef struct {
  pthread_mutex_t mutex;
  pthread_cond_t all_came;
  int num_present;
  unsigned round;
  char mine[NUM_RANKS][4096];
  char all[NUM_RANKS][4096]; /* of the last complete round */
} Meeting;

typedef struct {
  Meeting* meeting;
  int rank;
  int num_wrong; /* values that came home wrong; negative: the rank failed */
} Rank;

static ncclEpResult_t allgather(void* context, const void* mine, void* all, size_t bytes, uint64_t timeout_ns) {
  Rank* rank = context;
  Meeting* meeting = rank->meeting;
  struct timespec deadline;
  ncclEpResult_t result = NCCL_EP_SUCCESS;
  if (bytes > sizeof meeting->mine[0]) return NCCL_EP_SYSTEM_ERROR;
  clock_gettime(CLOCK_REALTIME, &deadline);
  deadline.tv_sec += (time_t)(timeout_ns / 1000000000u) + 1;

  pthread_mutex_lock(&meeting->mutex);
  const unsigned round = meeting->round;
  memcpy(meeting->mine[rank->rank], mine, bytes);
  if (++meeting->num_present == NUM_RANKS) {
    memcpy(meeting->all, meeting->mine, sizeof meeting->all);
    meeting->num_present = 0;
    meeting->round++;
    pthread_cond_broadcast(&meeting->all_came);
  }
  while (meeting->round == round && result == NCCL_EP_SUCCESS) {
    if (pthread_cond_timedwait(&meeting->all_came, &meeting->mutex, &deadline) == ETIMEDOUT) result = NCCL_EP_TIMEOUT;
  }
  /* Nobody overwrites `all` before this rank has come to the next round. */
  for (int r = 0; r < NUM_RANKS && result == NCCL_EP_SUCCESS; r++) {
    memcpy((char*)all + (size_t)r * bytes, meeting->all[r], bytes);
  }
  pthread_mutex_unlock(&meeting->mutex);
  return result;
}

static ncclEpTensor_t matrix(ncclEpDataType_t dtype, void* data, int64_t rows, int64_t columns) {
  ncclEpTensor_t tensor = NCCL_EP_TENSOR_INIT;
  tensor.ndim = 2;
  tensor.dtype = dtype;
  tensor.data = data;
  tensor.sizes[0] = rows;
  tensor.sizes[1] = columns;
  return tensor;
}

/* Runs them all; returns how many had something wrong. */
static int run_ranks(void* (*run_rank)(void*)) {
  static Meeting meeting = {.mutex = PTHREAD_MUTEX_INITIALIZER, .all_came = PTHREAD_COND_INITIALIZER};
  Rank ranks[NUM_RANKS];
  pthread_t threads[NUM_RANKS];
  int num_wrong = 0;
  for (int r = 0; r < NUM_RANKS; r++) {
    ranks[r] = (Rank){&meeting, r, -1};
    if (pthread_create(&threads[r], NULL, run_rank, &ranks[r]) != 0) exit(1);
  }
  for (int r = 0; r < NUM_RANKS; r++) {
    pthread_join(threads[r], NULL);
    num_wrong += ranks[r].num_wrong != 0;
  }
  return num_wrong;
}

#endif /* THREAD_RANKS_H_ */
