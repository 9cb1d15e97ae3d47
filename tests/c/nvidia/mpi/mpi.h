// As much of MPI as ep_test and ep_bench of nccl-extensions use. A rank's environment has MPI_NAME, MPI_RANK,
// MPI_RANKS.
#pragma once
#include <cstdlib>
#include <vector>

#include "../meeting.h"

enum { MPI_COMM_WORLD, MPI_SUCCESS = 0, MPI_ERR_OTHER };
enum MPI_Datatype {
  MPI_DATATYPE_NULL,
  MPI_BYTE,
  MPI_INT,
  MPI_UNSIGNED_LONG,
  MPI_UNSIGNED_LONG_LONG,
  MPI_DOUBLE,
  MPI_DOUBLE_INT,
};
enum MPI_Op { MPI_SUM, MPI_MIN, MPI_MAX, MPI_MINLOC, MPI_MAXLOC };
#define MPI_IN_PLACE nullptr

namespace mpi {

struct DoubleInt {
  double value;
  int at;
};

inline Member* world = nullptr;

inline size_t size_of(MPI_Datatype type) {
  switch (type) {
    case MPI_BYTE:
      return 1;
    case MPI_INT:
      return sizeof(int);
    case MPI_DOUBLE_INT:
      return sizeof(DoubleInt);
    default:
      return 8;
  }
}

inline int gathered(const void* mine, void* all, size_t bytes) {
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(120);
  return world->gather(mine, all, bytes, end) ? MPI_SUCCESS : MPI_ERR_OTHER;
}

template <class T>
void fold(T& into, const T& other, MPI_Op op) {
  if (op == MPI_SUM) into += other;
  if ((op == MPI_MIN && other < into) || (op == MPI_MAX && into < other)) into = other;
}
inline void fold(DoubleInt& into, const DoubleInt& other, MPI_Op op) {
  if (op == MPI_MINLOC ? other.value < into.value : into.value < other.value) into = other;
}

template <class T>
void folded(const char* all, void* out, int count, MPI_Op op) {
  for (int i = 0; i < count; i++) {
    const auto of = [&](int rank) { return reinterpret_cast<const T*>(all)[rank * count + i]; };
    T result = of(0);
    for (int rank = 1; rank < world->num_ranks; rank++) fold(result, of(rank), op);
    static_cast<T*>(out)[i] = result;
  }
}

}  // namespace mpi

inline int MPI_Init(int*, char***) {
  const char *name = std::getenv("MPI_NAME"), *rank = std::getenv("MPI_RANK"), *ranks = std::getenv("MPI_RANKS");
  if (name == nullptr || rank == nullptr || ranks == nullptr) return MPI_ERR_OTHER;
  mpi::world = Member::join(name, std::atoi(rank), std::atoi(ranks));
  return mpi::world == nullptr ? MPI_ERR_OTHER : MPI_SUCCESS;
}
inline int MPI_Finalize() { return MPI_SUCCESS; }
inline int MPI_Comm_rank(int, int* rank) { return *rank = mpi::world->rank, MPI_SUCCESS; }
inline int MPI_Comm_size(int, int* size) { return *size = mpi::world->num_ranks, MPI_SUCCESS; }
inline double MPI_Wtime() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

inline int MPI_Allgather(const void* mine, int, MPI_Datatype, void* all, int count, MPI_Datatype type, int) {
  const size_t bytes = count * mpi::size_of(type);
  std::vector<char> own(bytes);
  std::memcpy(own.data(), mine == MPI_IN_PLACE ? static_cast<char*>(all) + mpi::world->rank * bytes : mine, bytes);
  return mpi::gathered(own.data(), all, bytes);
}
inline int MPI_Bcast(void* data, int count, MPI_Datatype type, int root, int) {
  const size_t bytes = count * mpi::size_of(type);
  std::vector<char> all(bytes * mpi::world->num_ranks);
  const int result = mpi::gathered(data, all.data(), bytes);
  std::memcpy(data, all.data() + root * bytes, bytes);
  return result;
}
inline int MPI_Barrier(int) {
  char mine = 0, all[kMostRanks];
  return mpi::gathered(&mine, all, 1);
}
inline int MPI_Reduce(const void* mine, void* out, int count, MPI_Datatype type, MPI_Op op, int root, int) {
  std::vector<char> all(count * mpi::size_of(type) * mpi::world->num_ranks);
  const int result = mpi::gathered(mine, all.data(), count * mpi::size_of(type));
  if (result != MPI_SUCCESS || (root >= 0 && root != mpi::world->rank)) return result;
  switch (type) {
    case MPI_INT:
      mpi::folded<int>(all.data(), out, count, op);
      break;
    case MPI_DOUBLE:
      mpi::folded<double>(all.data(), out, count, op);
      break;
    case MPI_DOUBLE_INT:
      mpi::folded<mpi::DoubleInt>(all.data(), out, count, op);
      break;
    default:
      mpi::folded<unsigned long long>(all.data(), out, count, op);
  }
  return result;
}
inline int MPI_Allreduce(const void* mine, void* out, int count, MPI_Datatype type, MPI_Op op, int comm) {
  return MPI_Reduce(mine, out, count, type, op, -1, comm);
}
