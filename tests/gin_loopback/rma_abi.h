// What NCCL expects of an RMA plugin, version 14 of the interface: NCCL 2.30.7 and newer load it, and run their GIN
// proxy over it. The layout alone; NCCL's wheels have no header for it.
#pragma once

#include <cstddef>
#include <cstdint>

namespace gin_loopback {

using Result = int;  // ncclResult_t
constexpr Result kOk = 0, kSystemError = 2, kInternalError = 3, kInvalidArgument = 4;

enum PointerType : int { kHostMemory = 1, kCudaMemory = 2 };
enum SignalOp : uint32_t { kSignalIncrement = 1, kSignalAdd = 2 };
constexpr int kGinProxy = 2;             // a net device's type
constexpr uint64_t kNeverResetFlag = 2;  // of a memory region: its words are signals that only grow

struct NetProperties {
  char* name;
  char* pci_path;
  uint64_t guid;
  int ptr_support, reg_is_global, force_flush, speed, port;
  float latency;
  int max_comms, max_recvs, net_device_type, net_device_version;
  struct {
    int count;
    int devices[8];
  } virtual_device;
  size_t max_p2p_bytes, max_coll_bytes;
  int max_multi_request_size;
  int16_t rail_id, plane_id;
};

struct RmaConfig {
  int num_contexts, traffic_class, rank_stride;
};

struct RmaPlugin {
  const char* name;
  Result (*init)(void** context, uint64_t comm_id, void* log);
  Result (*devices)(int* count);
  Result (*get_properties)(int device, NetProperties* properties);
  Result (*listen)(void* context, int device, void* handle, void** listen_comm);
  Result (*connect)(void* context, void* handles[], int num_ranks, int rank, void* listen_comm, void** coll_comm);
  Result (*create_context)(void* coll_comm, RmaConfig* config, void** rma_context);
  Result (*register_memory)(void* coll_comm, void* data, size_t bytes, int type, uint64_t flags, void** region);
  Result (*register_dma_buf)(void* coll_comm, void* data, size_t bytes, int type, uint64_t offset, int fd,
                             uint64_t flags, void** region);
  Result (*deregister_memory)(void* coll_comm, void* region);
  Result (*destroy_context)(void* rma_context);
  Result (*close_coll)(void* coll_comm);
  Result (*close_listen)(void* listen_comm);
  Result (*put)(void* rma_context, int context, uint64_t source_offset, void* source, size_t bytes,
                uint64_t destination_offset, void* destination, uint32_t rank, void** request);
  Result (*put_signal)(void* rma_context, int context, uint64_t source_offset, void* source, size_t bytes,
                       uint64_t destination_offset, void* destination, uint32_t rank, uint64_t signal_offset,
                       void* signal, uint64_t value, uint32_t op, bool is_strong, void** request);
  Result (*get)(void* rma_context, int context, uint64_t remote_offset, void* remote, size_t bytes,
                uint64_t local_offset, void* local, uint32_t rank, void** request);
  Result (*flush)(void* rma_context, int context, void* region, uint32_t rank, void** request);
  Result (*test)(void* coll_comm, void* request, int* done);
  Result (*progress)(void* rma_context);  // may be null
  Result (*query_last_error)(void* rma_context, bool* has_error);
  Result (*finalize)(void* context);
};

}  // namespace gin_loopback
