// The plugin's functions, as NCCL calls them: errors become results, and a line on stderr.
#include <atomic>
#include <cstdio>
#include <cstring>
#include <memory>
#include <new>
#include <stdexcept>

#include "endpoint.h"

namespace gin_loopback {
namespace {

// A device communicator's share: its contexts are apart from those of another.
struct RmaContext {
  Endpoint* endpoint;
  uint32_t first_context;
  int num_contexts;
};

template <class Body>
Result guarded(const char* call, Body&& body) {
  try {
    return body();
  } catch (const std::invalid_argument& error) {
    std::fprintf(stderr, "gin_loopback: %s: %s\n", call, error.what());
    return kInvalidArgument;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "gin_loopback: %s: %s\n", call, error.what());
    return kSystemError;
  }
}

// Where a request is, in the pointer that stands for it: its number, and its target + 1.
void* request_of(int target, uint64_t number) { return reinterpret_cast<void*>(number << 8 | (target + 1)); }

Result init(void** context, uint64_t, void*) {
  *context = new char;
  return kOk;
}
Result finalize(void* context) {
  delete static_cast<char*>(context);
  return kOk;
}
Result devices(int* count) {
  *count = 1;
  return kOk;
}
Result get_properties(int device, NetProperties* properties) {
  static char name[] = "gin_loopback";
  *properties = {};
  properties->name = name;
  properties->guid = 0x67696E6C6F6F70ull;
  properties->ptr_support = kHostMemory | kCudaMemory;
  properties->speed = 200000;
  properties->port = 1;
  properties->latency = 5;
  properties->max_comms = 1 << 20;
  properties->max_recvs = Options::read().max_recvs;
  properties->net_device_type = kGinProxy;
  properties->virtual_device.count = 1;
  properties->virtual_device.devices[0] = device;
  properties->max_p2p_bytes = properties->max_coll_bytes = 1ull << 40;
  properties->max_multi_request_size = 1;
  properties->rail_id = properties->plane_id = -1;
  return kOk;
}

Result listen(void*, int, void* handle, void** listen_comm) {
  return guarded("listen", [&] {
    auto listener = std::make_unique<Listener>();
    std::memcpy(handle, &listener->handle(), sizeof(Handle));
    *listen_comm = listener.release();
    return kOk;
  });
}
Result close_listen(void* listen_comm) {
  delete static_cast<Listener*>(listen_comm);
  return kOk;
}
Result connect(void*, void* handles[], int num_ranks, int rank, void* listen_comm, void** coll_comm) {
  return guarded("connect", [&] {
    std::vector<Handle> all(static_cast<size_t>(num_ranks));
    for (int peer = 0; peer < num_ranks; peer++) std::memcpy(&all[peer], handles[peer], sizeof(Handle));
    *coll_comm = new Endpoint(all, rank, *static_cast<Listener*>(listen_comm), Options::read());
    return kOk;
  });
}
Result close_coll(void* coll_comm) {
  return guarded("closeColl", [&] {
    delete static_cast<Endpoint*>(coll_comm);
    return kOk;
  });
}

Result create_context(void* coll_comm, RmaConfig* config, void** rma_context) {
  auto* const endpoint = static_cast<Endpoint*>(coll_comm);
  const uint32_t first = endpoint->new_context();
  for (int i = 1; i < config->num_contexts; i++) endpoint->new_context();
  *rma_context = new RmaContext{endpoint, first, config->num_contexts};
  return kOk;
}
Result destroy_context(void* rma_context) {
  delete static_cast<RmaContext*>(rma_context);
  return kOk;
}

Result register_memory(void* coll_comm, void* data, size_t bytes, int type, uint64_t flags, void** region) {
  return guarded("regMrSym", [&] {
    *region = static_cast<Endpoint*>(coll_comm)->add(data, bytes, type, flags);
    return kOk;
  });
}
Result register_dma_buf(void*, void*, size_t, int, uint64_t, int, uint64_t, void**) {
  std::fprintf(stderr, "gin_loopback: regMrSymDmaBuf is not offered\n");
  return kInternalError;
}
Result deregister_memory(void* coll_comm, void* region) {
  return guarded("deregMrSym", [&] {
    if (region != nullptr) static_cast<Endpoint*>(coll_comm)->remove(static_cast<Region*>(region));
    return kOk;
  });
}

Result post(void* rma_context, int context, Endpoint::Put put, void** request) {
  *request = nullptr;
  auto* const own = static_cast<RmaContext*>(rma_context);
  if (context < 0 || context >= own->num_contexts) {
    throw std::invalid_argument("context " + std::to_string(context) + " of " + std::to_string(own->num_contexts));
  }
  if (put.target < 0 || put.target >= own->endpoint->num_ranks()) {
    throw std::invalid_argument("rank " + std::to_string(put.target) + " of " +
                                std::to_string(own->endpoint->num_ranks()));
  }
  if (own->endpoint->has_failed(put.target)) return kSystemError;
  put.context = own->first_context + static_cast<uint32_t>(context);
  *request = request_of(put.target, own->endpoint->post(put));
  return kOk;
}
Result put(void* rma_context, int context, uint64_t source_offset, void* source, size_t bytes,
           uint64_t destination_offset, void* destination, uint32_t rank, void** request) {
  return guarded("iput", [&] {
    Endpoint::Put put;
    put.target = static_cast<int>(rank);
    put.source = static_cast<Region*>(source);
    put.destination = static_cast<Region*>(destination);
    put.source_offset = source_offset;
    put.destination_offset = destination_offset;
    put.bytes = bytes;
    return post(rma_context, context, put, request);
  });
}
Result put_signal(void* rma_context, int context, uint64_t source_offset, void* source, size_t bytes,
                  uint64_t destination_offset, void* destination, uint32_t rank, uint64_t signal_offset, void* signal,
                  uint64_t value, uint32_t op, bool is_strong, void** request) {
  return guarded("iputSignal", [&] {
    if (signal == nullptr) throw std::invalid_argument("no region of signals");
    Endpoint::Put put;
    put.target = static_cast<int>(rank);
    put.source = static_cast<Region*>(source);
    put.destination = static_cast<Region*>(destination);
    put.signal = static_cast<Region*>(signal);
    put.source_offset = source_offset;
    put.destination_offset = destination_offset;
    put.bytes = bytes;
    put.signal_offset = signal_offset;
    put.add = op == kSignalIncrement ? 1 : value;
    put.is_strong = is_strong;
    return post(rma_context, context, put, request);
  });
}
Result get(void*, int, uint64_t, void*, size_t, uint64_t, void*, uint32_t, void**) {
  std::fprintf(stderr, "gin_loopback: iget is not offered\n");
  return kInternalError;
}
Result flush(void*, int, void*, uint32_t, void** request) {
  *request = nullptr;  // nothing to wait for: there are no gets
  return kOk;
}

Result test(void* coll_comm, void* request, int* done) {
  *done = 1;
  if (request == nullptr) return kOk;
  auto* const endpoint = static_cast<Endpoint*>(coll_comm);
  const auto bits = reinterpret_cast<uint64_t>(request);
  const int target = static_cast<int>(bits & 255) - 1;
  *done = endpoint->is_done(target, bits >> 8) ? 1 : 0;
  return *done == 0 && endpoint->has_failed(target) ? kSystemError : kOk;
}
Result query_last_error(void* rma_context, bool* has_error) {
  *has_error = static_cast<RmaContext*>(rma_context)->endpoint->has_failed();
  return kOk;
}

}  // namespace
}  // namespace gin_loopback

extern "C" {
__attribute__((visibility("default"))) gin_loopback::RmaPlugin ncclRmaPlugin_v14 = {
    "gin_loopback",
    gin_loopback::init,
    gin_loopback::devices,
    gin_loopback::get_properties,
    gin_loopback::listen,
    gin_loopback::connect,
    gin_loopback::create_context,
    gin_loopback::register_memory,
    gin_loopback::register_dma_buf,
    gin_loopback::deregister_memory,
    gin_loopback::destroy_context,
    gin_loopback::close_coll,
    gin_loopback::close_listen,
    gin_loopback::put,
    gin_loopback::put_signal,
    gin_loopback::get,
    gin_loopback::flush,
    gin_loopback::test,
    nullptr,
    gin_loopback::query_last_error,
    gin_loopback::finalize,
};
}
