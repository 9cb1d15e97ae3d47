/* Ranks that are processes of one program, each with a GPU of its own or on the CPU: where they meet, their memory, and
 * what every example needs. With MPI, mpirun would start the processes and MPI_Allgather be the meeting.
 *
 *     PROGRAM [cpu|cuda] [RANKS]      4 ranks on the CPU by default; on "cuda" rank r has GPU r
 *
 * A program for GPUs is compiled with -DEXAMPLES_WITH_CUDA and linked with the CUDA runtime. */
#ifndef RANKS_H_
#define RANKS_H_

#define _DEFAULT_SOURCE /* for MAP_ANONYMOUS */
#include <errno.h>
#include <nccl_epx.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>
#ifdef EXAMPLES_WITH_CUDA
#include <cuda_runtime_api.h>
#endif

enum { NUM_EXPERTS = 8, MAX_RANKS = 8 };

#define CHECK(call)                                   \
  do {                                                \
    if ((call) != ncclSuccess) {                      \
      fprintf(stderr, "%s\n", ncclEpxGetLastError()); \
      exit(1);                                        \
    }                                                 \
  } while (0)

#define CHECK_CUDA(call)                                              \
  do {                                                                \
    const cudaError_t error_ = (call);                                \
    if (error_ != cudaSuccess) {                                      \
      fprintf(stderr, "%s: %s\n", #call, cudaGetErrorString(error_)); \
      exit(1);                                                        \
    }                                                                 \
  } while (0)

/* ---- The meeting, in memory that the processes share ---- */

typedef struct {
  pthread_mutex_t mutex;
  pthread_cond_t all_came;
  int num_present;
  unsigned round;
  char mine[MAX_RANKS][4096];
  char all[MAX_RANKS][4096]; /* of the last complete round */
} Meeting;

typedef struct {
  Meeting* meeting;
  int rank, num_ranks, num_local_experts;
  int device; /* that its tensors are on: a GPU's number, or NCCL_EPX_DEVICE_CPU */
  ncclComm_t comm;
} Rank;

static Meeting* make_meeting(void) {
  Meeting* meeting = mmap(NULL, sizeof *meeting, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0); /* zeros */
  pthread_mutexattr_t of_mutex;
  pthread_condattr_t of_condition;
  if (meeting == MAP_FAILED) {
    perror("mmap");
    exit(1);
  }
  pthread_mutexattr_init(&of_mutex);
  pthread_mutexattr_setpshared(&of_mutex, PTHREAD_PROCESS_SHARED);
  pthread_mutex_init(&meeting->mutex, &of_mutex);
  pthread_condattr_init(&of_condition);
  pthread_condattr_setpshared(&of_condition, PTHREAD_PROCESS_SHARED);
  pthread_cond_init(&meeting->all_came, &of_condition);
  return meeting;
}

static int32_t allgather(void* context, const void* mine, void* all, size_t bytes, uint64_t timeout_ns) {
  const Rank* me = context;
  Meeting* meeting = me->meeting;
  struct timespec deadline;
  int32_t result = 0;
  if (bytes > sizeof meeting->mine[0]) return NCCL_EPX_SYSTEM_ERROR;
  clock_gettime(CLOCK_REALTIME, &deadline);
  deadline.tv_sec += (time_t)(timeout_ns / 1000000000u) + 1;

  pthread_mutex_lock(&meeting->mutex);
  const unsigned round = meeting->round;
  memcpy(meeting->mine[me->rank], mine, bytes);
  if (++meeting->num_present == me->num_ranks) {
    memcpy(meeting->all, meeting->mine, sizeof meeting->all);
    meeting->num_present = 0;
    meeting->round++;
    pthread_cond_broadcast(&meeting->all_came);
  }
  while (meeting->round == round && result == 0) {
    if (pthread_cond_timedwait(&meeting->all_came, &meeting->mutex, &deadline) == ETIMEDOUT) result = NCCL_EPX_TIMEOUT;
  }
  /* Nobody overwrites `all` before this rank has come to the next round. */
  for (int r = 0; r < me->num_ranks && result == 0; r++) {
    memcpy((char*)all + (size_t)r * bytes, meeting->all[r], bytes);
  }
  pthread_mutex_unlock(&meeting->mutex);
  return result;
}

/* ---- Memory of a rank's device. On a GPU all copies go over the default stream, as do operations whose stream is
 * null: each begins when the one before is done. ---- */

static void* allocate(const Rank* me, size_t bytes) {
  void* memory = NULL;
#ifdef EXAMPLES_WITH_CUDA
  if (me->device >= 0) {
    CHECK_CUDA(cudaMalloc(&memory, bytes));
    return memory;
  }
#endif
  (void)me;
  memory = aligned_alloc(64, (bytes + 63) / 64 * 64);
  if (memory == NULL && bytes > 0) {
    perror("aligned_alloc");
    exit(1);
  }
  return memory;
}

static void release(const Rank* me, void* memory) {
#ifdef EXAMPLES_WITH_CUDA
  if (me->device >= 0) {
    CHECK_CUDA(cudaFree(memory));
    return;
  }
#endif
  (void)me;
  free(memory);
}

/* Between the device and the host, either way. */
static void copy(const Rank* me, void* to, const void* from, size_t bytes) {
  if (bytes == 0) return;
#ifdef EXAMPLES_WITH_CUDA
  if (me->device >= 0) {
    CHECK_CUDA(cudaMemcpy(to, from, bytes, cudaMemcpyDefault));
    return;
  }
#endif
  (void)me;
  memcpy(to, from, bytes);
}

/* ---- Tensors on it ---- */

static size_t bytes_of(const ncclEpTensor_t* tensor) {
  size_t bytes;
  CHECK(ncclEpxTensorBytes(tensor, &bytes));
  return bytes;
}

/* A tensor without memory. */
static ncclEpTensor_t* describe(ncclDataType_t type, unsigned ndim, size_t first, size_t second, size_t third) {
  const size_t sizes[] = {first, second, third};
  ncclEpTensor_t* tensor;
  CHECK(ncclEpTensorAlloc(&tensor, ndim, type, sizes, NULL));
  return tensor;
}

/* With the host's values; null: with no particular ones. */
static ncclEpTensor_t* matrix(const Rank* me, ncclDataType_t type, size_t rows, size_t columns, const void* values) {
  ncclEpTensor_t* tensor = describe(type, 2, rows, columns, 0);
  tensor->data = allocate(me, bytes_of(tensor));
  if (values != NULL) copy(me, tensor->data, values, bytes_of(tensor));
  return tensor;
}

static void drop(const Rank* me, ncclEpTensor_t* tensor) {
  release(me, tensor->data);
  CHECK(ncclEpTensorDestroy(tensor));
}

/* A copy on the host, to be freed. */
static void* fetch(const Rank* me, const ncclEpTensor_t* tensor) {
  const size_t bytes = bytes_of(tensor);
  void* values = malloc(bytes + 1);
  if (values == NULL) exit(1);
  copy(me, values, tensor->data, bytes);
  return values;
}

/* Puts such a copy back, and frees it. */
static void store(const Rank* me, const ncclEpTensor_t* tensor, void* values) {
  copy(me, tensor->data, values, bytes_of(tensor));
  free(values);
}

/* ---- The ranks ---- */

typedef struct {
  int on_gpus, num_ranks;
} World;

/* First in main: what the arguments ask for. Ends the program with 2 if they are wrong. */
static World parse_world(int argc, char** argv) {
  setvbuf(stdout, NULL, _IOLBF, BUFSIZ); /* the ranks' lines stay whole, also in a pipe */
  const char* device = argc > 1 ? argv[1] : "cpu";
  const char* ranks = argc > 2 ? argv[2] : "4";
  char* end;
  const long num_ranks = strtol(ranks, &end, 10);
  const int is_number = *ranks != '\0' && *end == '\0';
  const World world = {strcmp(device, "cuda") == 0, (int)num_ranks};
  if (argc > 3 || (!world.on_gpus && strcmp(device, "cpu") != 0) || !is_number || num_ranks < 1 ||
      num_ranks > MAX_RANKS || NUM_EXPERTS % num_ranks != 0) {
    fprintf(stderr, "usage: %s [cpu|cuda] [RANKS], where RANKS divides %d; not %s %s%s\n", argv[0], NUM_EXPERTS, device,
            ranks, argc > 3 ? " and more" : "");
    exit(2);
  }
#ifndef EXAMPLES_WITH_CUDA
  if (world.on_gpus) {
    fprintf(stderr, "cuda: %s was compiled without EXAMPLES_WITH_CUDA\n", argv[0]);
    exit(2);
  }
#endif
  return world;
}

static void use_device(const Rank* me) {
#ifdef EXAMPLES_WITH_CUDA
  const cudaError_t error = me->device >= 0 ? cudaSetDevice(me->device) : cudaSuccess;
  if (error != cudaSuccess) {
    fprintf(stderr, "rank %d cannot use GPU %d: %s\n", me->rank, me->device, cudaGetErrorString(error));
    exit(1);
  }
#endif
  (void)me;
}

/* Runs them all. `run_rank` returns how many values are wrong; this function, how many ranks had some or failed. CUDA
 * does not survive a fork, so nothing of it may have been called before. */
static int run_ranks(World world, int (*run_rank)(Rank* me)) {
  Meeting* meeting = make_meeting();
  pid_t pids[MAX_RANKS];
  int num_failed = 0;
  fflush(stdout); /* or each rank prints again what is waiting */
  for (int r = 0; r < world.num_ranks; r++) {
    pids[r] = fork();
    if (pids[r] < 0) {
      perror("fork");
      exit(1);
    }
    if (pids[r] > 0) continue;
    Rank me = {meeting, r, world.num_ranks, NUM_EXPERTS / world.num_ranks, world.on_gpus ? r : NCCL_EPX_DEVICE_CPU,
               NULL};
    use_device(&me);
    CHECK(ncclEpxCommFromCallback(&me.comm, me.rank, me.num_ranks, me.device, allgather, &me));
    const int num_wrong = run_rank(&me);
    CHECK(ncclEpxCommDestroy(me.comm));
    exit(num_wrong != 0);
  }
  for (int r = 0; r < world.num_ranks; r++) {
    int status;
    if (waitpid(pids[r], &status, 0) == pids[r] && status == 0) continue;
    fprintf(stderr, "rank %d failed\n", r);
    num_failed++;
  }
  return num_failed;
}

#endif /* RANKS_H_ */
