#include "cuda/host/cumem_window.h"

#include <memory>

#include "base/check.h"
#include "base/math.h"
#include "cuda/host/driver.h"
#include "transport/collective_step.h"

namespace ep {
namespace {

constexpr const char* kAddress = "the socket for its window";

void check_driver(CUresult result, const char* call) {
  if (result == CUDA_SUCCESS) return;
  const char* text = nullptr;
  driver().get_error_string(result, &text);
  raise(ErrorKind::kSystem, call, ": ", text == nullptr ? "an unknown error" : text);
}

CUmemAllocationProp properties_of(int device) {
  CUmemAllocationProp properties{};
  properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  properties.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
  properties.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  properties.location.id = device;
  return properties;
}

}  // namespace

CumemWindow::CumemWindow(Bootstrap& bootstrap, int device, int num_ranks, uint64_t bytes, double seconds)
    : device_(device), piece_bytes_(num_ranks) {
  peers_.rank = bootstrap.own_rank();
  try {
    std::unique_ptr<DescriptorMail> mail;
    const auto addresses = gather_from_steps(
        bootstrap,
        [&] {
          allocate(num_ranks, bytes);
          mail = std::make_unique<DescriptorMail>();
          return mail->address();
        },
        kAddress);
    on_all_ranks(bootstrap, [&] {
      std::vector<int> ranks;
      std::vector<DescriptorMail::Address> others;
      for (int seat = 0; seat < bootstrap.num_ranks(); seat++) {
        if (seat == bootstrap.rank()) continue;
        ranks.push_back(bootstrap.rank_at(seat));
        others.push_back(addresses[seat]);
      }
      exchange(*mail, ranks, others, seconds);
      for (int rank = 0; rank < num_ranks; rank++) {
        if (piece_bytes_[rank] == 0) map_nobody(rank);
      }
    });
  } catch (...) {
    release();
    throw;
  }
}

CumemWindow::~CumemWindow() { release(); }

void CumemWindow::replace(Bootstrap& bootstrap, int rank, double seconds) {
  std::unique_ptr<DescriptorMail> mail;
  const auto addresses = gather_from_steps(
      bootstrap,
      [&] {
        mail = std::make_unique<DescriptorMail>();
        return mail->address();
      },
      kAddress);
  on_all_ranks(bootstrap, [&] {
    for (int seat = 0; seat < bootstrap.num_ranks(); seat++) {
      if (bootstrap.rank_at(seat) != rank) continue;
      try {
        exchange(*mail, {rank}, {addresses[seat]}, seconds);
      } catch (...) {
        // Kernels go on to store masks and heartbeats there.
        try {
          map_nobody(rank);
        } catch (const Error&) {
        }
        throw;
      }
    }
  });
}

void CumemWindow::allocate(int num_ranks, uint64_t bytes) {
  const CUmemAllocationProp properties = properties_of(device_);
  size_t granularity = 0;
  check_driver(driver().mem_get_allocation_granularity(&granularity, &properties, CU_MEM_ALLOC_GRANULARITY_RECOMMENDED),
               "cuMemGetAllocationGranularity");
  granularity_ = granularity;
  peers_.stride = align_up<uint64_t>(bytes, granularity_);
  CUdeviceptr base = 0;
  check_driver(driver().mem_address_reserve(&base, peers_.stride * num_ranks, granularity_, 0, 0),
               "cuMemAddressReserve");
  peers_.base = reinterpret_cast<char*>(base);
  own_ = create(peers_.stride);
  map(peers_.rank, own_, peers_.stride);
}

CumemWindow::Handle CumemWindow::create(uint64_t bytes) const {
  const CUmemAllocationProp properties = properties_of(device_);
  Handle memory = 0;
  const CUresult result = driver().mem_create(&memory, bytes, &properties, 0);
  if (result == CUDA_ERROR_OUT_OF_MEMORY) {
    raise(ErrorKind::kSystem, "no memory for a window of ", bytes, " bytes: cuMemCreate");
  }
  check_driver(result, "cuMemCreate");
  return memory;
}

CUdeviceptr CumemWindow::address_of(int rank) const { return reinterpret_cast<CUdeviceptr>(peers_.at<char>(rank, 0)); }

void CumemWindow::map(int rank, Handle memory, uint64_t bytes) {
  unmap(rank);
  const CUdeviceptr begin = address_of(rank);
  for (CUdeviceptr at = begin; at < begin + peers_.stride; at += bytes) {
    const CUresult result = driver().mem_map(at, bytes, 0, memory, 0);
    if (result == CUDA_SUCCESS) continue;
    while (at > begin) driver().mem_unmap(at -= bytes, bytes);
    check_driver(result, "cuMemMap");
  }
  piece_bytes_[rank] = bytes;
  CUmemAccessDesc access{};
  access.location = properties_of(device_).location;
  access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
  const CUresult result = driver().mem_set_access(begin, peers_.stride, &access, 1);
  if (result != CUDA_SUCCESS && rank != peers_.rank) {
    raise(
        ErrorKind::kSystem, "this GPU cannot reach the memory of rank ", rank,
        ": GPUs whose windows are of cuMem must be in one machine, and every one must have peer access to every other");
  }
  check_driver(result, "cuMemSetAccess");
}

void CumemWindow::map_nobody(int rank) {
  if (nobody_ == 0) nobody_ = create(granularity_);
  map(rank, nobody_, granularity_);
}

void CumemWindow::unmap(int rank) {
  const uint64_t bytes = piece_bytes_[rank];
  if (bytes == 0) return;
  piece_bytes_[rank] = 0;
  const CUdeviceptr begin = address_of(rank);
  for (CUdeviceptr at = begin; at < begin + peers_.stride; at += bytes) {
    check_driver(driver().mem_unmap(at, bytes), "cuMemUnmap");
  }
}

void CumemWindow::exchange(DescriptorMail& mail, const std::vector<int>& ranks,
                           const std::vector<DescriptorMail::Address>& others, double seconds) {
  int fd = -1;
  check_driver(driver().mem_export(&fd, own_, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0),
               "cuMemExportToShareableHandle");
  const File own(fd);
  const std::vector<File> files = mail.exchange(own.fd(), others, ranks, seconds);
  for (size_t i = 0; i < ranks.size(); i++) {
    Handle memory = 0;
    void* const given = reinterpret_cast<void*>(static_cast<uintptr_t>(files[i].fd()));
    check_driver(driver().mem_import(&memory, given, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR),
                 "cuMemImportFromShareableHandle");
    try {
      map(ranks[i], memory, peers_.stride);
    } catch (...) {
      driver().mem_release(memory);
      throw;
    }
    driver().mem_release(memory);  // the mapping keeps it
  }
}

// At the end of a process CUDA may be gone: errors mean nothing here.
void CumemWindow::release() {
  if (peers_.base == nullptr) return;
  for (size_t rank = 0; rank < piece_bytes_.size(); rank++) {
    const uint64_t bytes = piece_bytes_[rank];
    const CUdeviceptr begin = address_of(static_cast<int>(rank));
    for (uint64_t at = 0; bytes != 0 && at < peers_.stride; at += bytes) driver().mem_unmap(begin + at, bytes);
  }
  driver().mem_address_free(reinterpret_cast<CUdeviceptr>(peers_.base), peers_.stride * piece_bytes_.size());
  if (own_ != 0) driver().mem_release(own_);
  if (nobody_ != 0) driver().mem_release(nobody_);
  peers_ = {};
}

}  // namespace ep
