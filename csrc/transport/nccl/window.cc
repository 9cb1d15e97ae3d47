#include "transport/nccl/window.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "base/interruption.h"
#include "transport/collective_step.h"
#include "transport/nccl/api.h"
#include "transport/nccl/version.h"

namespace ep {
namespace {

using Clock = std::chrono::steady_clock;

// From NCCL 2.31 on the end of a communicator waits for the other ranks' end. Ours has nothing in flight, so a rank
// whose peers are not there soon aborts it.
constexpr double kFinalizeSeconds = 1;

Clock::time_point deadline_in(double seconds) {
  return Clock::now() + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds));
}

// FNV-1a; NCCL's ids hold random words.
uint64_t hash_of(const ncclUniqueId& id) {
  uint64_t hash = 14695981039346656037ull;
  for (char byte : id.internal) hash = (hash ^ static_cast<unsigned char>(byte)) * 1099511628211ull;
  return hash;
}

// Waits until a non-blocking call has ended. Some calls return ncclSuccess while their work is still going on, hence
// the communicator's state is always asked.
void wait_for(ncclComm_t comm, ncclResult_t result, const char* call, double seconds) {
  constexpr std::chrono::milliseconds kLookEvery{20};
  const auto deadline = deadline_in(seconds);
  auto next_look = Clock::now() + kLookEvery;
  while (result == ncclSuccess || result == ncclInProgress) {
    ncclResult_t state = ncclSuccess;
    check_nccl(nccl().comm_get_async_error(comm, &state), "ncclCommGetAsyncError", comm);
    if (state == ncclSuccess) return;
    if (state == ncclInProgress && Clock::now() >= deadline) {
      raise(ErrorKind::kTimeout, call, " has not ended within ", seconds, " s: a rank is missing or hangs");
    }
    result = state;
    if (Clock::now() >= next_look) {
      if (has_interruption()) throw Interrupted(call);
      next_look = Clock::now() + kLookEvery;
    }
    std::this_thread::sleep_for(std::chrono::microseconds(200));
  }
  raise_nccl(result, call, comm);
}

ncclComm_t init_comm(const ncclUniqueId& id, int rank, int num_ranks, double seconds) {
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  config.blocking = 0;
  config.maxCTAs = 1;  // windows are all that it is for: NCCL's own buffers grow with the blocks of its collectives
  ncclComm_t comm = nullptr;
  const ncclResult_t result = nccl().comm_init_rank_config(&comm, num_ranks, id, rank, &config);
  if (comm == nullptr) raise_nccl(result, "ncclCommInitRankConfig", nullptr);
  try {
    wait_for(comm, result, "ncclCommInitRankConfig", seconds);
  } catch (const Error&) {
    nccl().comm_abort(comm);
    throw;
  }
  return comm;
}

// Rank 0's new id on every rank.
ncclUniqueId share_unique_id(Bootstrap& bootstrap) {
  const auto ids = gather_from_steps(
      bootstrap,
      [&] {
        ncclUniqueId id{};
        nccl();
        if (bootstrap.rank() == 0) check_nccl(nccl().get_unique_id(&id), "ncclGetUniqueId");
        return id;
      },
      "an NCCL id");
  return ids[0];
}

// The smallest id that every rank offers; 0 if there is none.
uint64_t common_id(const std::vector<std::string>& offers) {
  std::vector<std::vector<uint64_t>> ids;
  for (const std::string& offer : offers) {
    auto& list = ids.emplace_back(offer.size() / sizeof(uint64_t));
    std::memcpy(list.data(), offer.data(), list.size() * sizeof(uint64_t));
  }
  uint64_t best = 0;
  for (uint64_t id : ids[0]) {
    const bool is_common = std::all_of(ids.begin(), ids.end(), [id](const auto& list) {
      return std::find(list.begin(), list.end(), id) != list.end();
    });
    if (is_common && (best == 0 || id < best)) best = id;
  }
  return best;
}

}  // namespace

struct NcclComm::Registry {
  std::mutex mutex;  // also of every has_failed_
  std::vector<std::weak_ptr<NcclComm>> comms;
};

NcclComm::Registry& NcclComm::registry() {
  static Registry& registry = *new Registry;  // outlives every static object that owns a buffer
  return registry;
}

NcclComm::NcclComm(ncclComm_t comm, uint64_t id, int rank, int num_ranks, int device, bool is_own)
    : comm_(comm), id_(id), rank_(rank), num_ranks_(num_ranks), device_(device), is_own_(is_own) {}

bool NcclComm::fits(int rank, int num_ranks, int device) const {
  return is_own_ && !has_failed_ && rank_ == rank && num_ranks_ == num_ranks && device_ == device;
}

std::shared_ptr<NcclComm> NcclComm::agree(Bootstrap& bootstrap, int device, double seconds) {
  const int rank = bootstrap.rank(), num_ranks = bootstrap.num_ranks();
  std::vector<std::shared_ptr<NcclComm>> mine;
  std::string offer;
  {
    std::vector<std::shared_ptr<NcclComm>> others;  // their other users may let go meanwhile: they end without the lock
    std::lock_guard lock(registry().mutex);
    std::erase_if(registry().comms, [](const auto& comm) { return comm.expired(); });
    for (const auto& weak : registry().comms) {
      auto comm = weak.lock();
      if (!comm) continue;
      const bool fits = comm->fits(rank, num_ranks, device);
      if (fits) offer.append(reinterpret_cast<const char*>(&comm->id_), sizeof comm->id_);
      (fits ? mine : others).push_back(std::move(comm));
    }
  }
  if (const uint64_t id = common_id(bootstrap.allgather(offer))) {
    return *std::find_if(mine.begin(), mine.end(), [id](const auto& comm) { return comm->id_ == id; });
  }

  const ncclUniqueId unique_id = share_unique_id(bootstrap);
  std::shared_ptr<NcclComm> comm;
  on_all_ranks(bootstrap, [&] {
    const ncclComm_t made = init_comm(unique_id, rank, num_ranks, seconds);
    comm.reset(new NcclComm(made, hash_of(unique_id), rank, num_ranks, device, /*is_own=*/true));
    comm->has_failed_ = true;  // unless all ranks have made it
  });
  std::lock_guard lock(registry().mutex);
  comm->has_failed_ = false;
  registry().comms.push_back(comm);
  return comm;
}

std::shared_ptr<NcclComm> NcclComm::borrow(Bootstrap& bootstrap, ncclComm_t comm, int device) {
  on_all_ranks(bootstrap, [&] {
    int rank = -1, num_ranks = -1, comm_device = -1;
    check_nccl(nccl().comm_user_rank(comm, &rank), "ncclCommUserRank", comm);
    check_nccl(nccl().comm_count(comm, &num_ranks), "ncclCommCount", comm);
    check_nccl(nccl().comm_cu_device(comm, &comm_device), "ncclCommCuDevice", comm);
    EP_CHECK(rank == bootstrap.rank() && num_ranks == bootstrap.num_ranks(), "the communicator given has rank ", rank,
             " of ", num_ranks, ", the group has rank ", bootstrap.rank(), " of ", bootstrap.num_ranks());
    EP_CHECK(comm_device == device, "the communicator given is of GPU ", comm_device, ", the current one is ", device);
  });
  return std::shared_ptr<NcclComm>(
      new NcclComm(comm, 0, bootstrap.rank(), bootstrap.num_ranks(), device, /*is_own=*/false));
}

NcclComm::~NcclComm() {
  if (is_abandoned()) {
    for (Unfinished& each : unfinished_) static_cast<void>(each.window.release());
    return;
  }
  if (!is_own_) {
    for (Unfinished& each : unfinished_) static_cast<void>(each.window.release());
    return;
  }
  if (!has_failed_) {
    try {
      wait_for(comm_, nccl().comm_finalize(comm_), "ncclCommFinalize", kFinalizeSeconds);
      nccl().comm_destroy(comm_);
      return;
    } catch (const Error&) {  // then without the peers
    }
  }
  nccl().comm_abort(comm_);  // waits for the threads that work for the communicator
  for (const Unfinished& each : unfinished_) nccl().mem_free(each.memory);
}

void NcclComm::leave_unfinished(void* memory, std::unique_ptr<ncclWindow_t> window) {
  std::lock_guard lock(registry().mutex);
  unfinished_.push_back({memory, std::move(window)});
}

void NcclComm::finish(ncclResult_t result, const char* call, double seconds) { wait_for(comm_, result, call, seconds); }

void NcclComm::fail() {
  std::lock_guard lock(registry().mutex);
  has_failed_ = true;
}

void NcclComm::abandon() {
  is_abandoned_ = true;
  fail();
}

NcclWindow::NcclWindow(Bootstrap& bootstrap, std::shared_ptr<NcclComm> comm, const Topology& topology, uint64_t bytes,
                       double seconds)
    : comm_(std::move(comm)) {
  try {
    on_all_ranks(bootstrap, [&] { allocate(bytes); });
    on_all_ranks(bootstrap, [&] { map(bytes, topology, bootstrap.rank(), seconds); });
  } catch (...) {
    release();
    throw;
  }
}

NcclWindow::~NcclWindow() { release(); }

void NcclWindow::allocate(uint64_t bytes) {
  const ncclResult_t result = nccl().mem_alloc(&memory_, bytes);
  if (result != ncclSuccess) {
    memory_ = nullptr;
    raise(ErrorKind::kSystem, "no memory for a window of ", bytes,
          " bytes: ncclMemAlloc: ", nccl().get_error_string(result));
  }
}

void NcclWindow::map(uint64_t bytes, const Topology& topology, int rank, double seconds) {
  // On the heap: NCCL may still write it after a deadline was missed. Then the communicator keeps it, and the memory.
  auto window = std::make_unique<ncclWindow_t>(nullptr);
  try {
    comm_->finish(nccl().comm_window_register(comm_->get(), memory_, bytes, window.get(), NCCL_WIN_DEFAULT),
                  "ncclCommWindowRegister", seconds);
  } catch (const Error& error) {
    comm_->fail();
    if (error.kind() == ErrorKind::kTimeout) {
      comm_->leave_unfinished(std::exchange(memory_, nullptr), std::move(window));
    }
    throw;
  }
  window_ = *window;
  if (window_ == nullptr) {
    raise(ErrorKind::kSystem, "NCCL gave no window that the ", topology.domain_size,
          " ranks of a domain can reach by loads and stores: they must share one NVLink domain (a machine, or a rack "
          "joined by NVLink), every GPU must have peer access to every other, and neither NCCL_CUMEM_ENABLE nor "
          "NCCL_WIN_ENABLE may be 0",
          topology.num_domains() > 1 ? "; between domains NCCL needs GPU-initiated networking (GIN)" : "");
  }
  const NcclTeam team = nccl().team_lsa(comm_->get());  // valid once a window was registered, in every version
  const std::string problem = domain_problem(topology, team.num_ranks);
  if (!problem.empty()) raise(ErrorKind::kSystem, problem);
  if (team.rank != topology.lsa_rank(rank)) {
    raise(ErrorKind::kSystem, "rank ", rank, " has place ", team.rank, " in its NVLink domain, expected ",
          topology.lsa_rank(rank), ": ranks of a domain must have consecutive numbers");
  }
  const int first_rank = rank - team.rank;
  if (nccl().get_lsa_device_pointer == nullptr) {
    peers_ = query_lsa_peers(window_);
  } else {
    void *first = nullptr, *second = nullptr;
    check_nccl(nccl().get_lsa_device_pointer(window_, 0, 0, &first), "ncclGetLsaDevicePointer", comm_->get());
    if (team.num_ranks > 1) {
      check_nccl(nccl().get_lsa_device_pointer(window_, 0, 1, &second), "ncclGetLsaDevicePointer", comm_->get());
    } else {
      second = static_cast<char*>(first) + bytes;
    }
    peers_.base = static_cast<char*>(first);
    peers_.stride = static_cast<uint64_t>(static_cast<char*>(second) - static_cast<char*>(first));
    peers_.rank = team.rank;
  }
  if (peers_.base == nullptr || peers_.stride < bytes || peers_.rank != team.rank) {
    raise(ErrorKind::kSystem, "NCCL maps the windows in a way this build does not know (base ",
          static_cast<const void*>(peers_.base), ", stride ", peers_.stride, ", rank ", peers_.rank, ", expected rank ",
          team.rank, "): build nccl_ep with the headers of the NCCL loaded, ", nccl().path);
  }
  peers_.base -= first_rank * peers_.stride;  // so that ranks are those of the world
  peers_.rank = rank;
}

void NcclWindow::release() {
  if (comm_->is_abandoned()) return;
  if (window_ != nullptr) nccl().comm_window_deregister(comm_->get(), window_);
  if (memory_ != nullptr) nccl().mem_free(memory_);
  window_ = nullptr;
  memory_ = nullptr;
  comm_.reset();
}

}  // namespace ep
