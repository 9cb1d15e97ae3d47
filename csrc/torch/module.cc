// The extension module nccl_ep._C: groups for windows.py, and by being loaded, the ops of torch/ops/.
#include <pybind11/functional.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <optional>
#include <utility>

#include "api/factory.h"
#include "base/check.h"
#include "runtime/room.h"
#include "torch/call/define.h"
#include "torch/call/given.h"
#include "torch/common/errors.h"
#include "torch/common/interruption.h"
#include "torch/common/lock.h"
#include "torch/observer.h"
#include "torch/ops/fast_call.h"
#include "torch/ops/registry.h"
#include "torch/policy.h"
#include "torch/stats.h"
#include "transport/session.h"
#if defined(EP_LAB)
#include "cuda/testing/testing.h"
#endif
#if defined(EP_WITH_CUDA)
#include "cuda/host/gin/network_probe.h"
#endif

namespace py = pybind11;

namespace ep {
namespace {

// A rendezvous that Python provides: bytes of this rank in, bytes of all ranks out.
class PythonBootstrap : public Bootstrap {
 public:
  PythonBootstrap(int rank, int num_ranks, py::function allgather)
      : rank_(rank), num_ranks_(num_ranks), allgather_(std::move(allgather)) {}
  // `seats`: the ranks that meet, in the order of their bytes.
  PythonBootstrap(int rank, std::vector<int> seats, py::function allgather)
      : rank_(static_cast<int>(std::find(seats.begin(), seats.end(), rank) - seats.begin())),
        num_ranks_(static_cast<int>(seats.size())),
        seats_(std::move(seats)),
        allgather_(std::move(allgather)) {}
  int rank() const override { return rank_; }
  int num_ranks() const override { return num_ranks_; }
  int rank_at(int seat) const override { return seats_.empty() ? seat : seats_[seat]; }
  std::vector<std::string> allgather(std::string_view mine) override {
    const LockHold lock;
    std::vector<std::string> all;
    const py::bytes own(mine.data(), mine.size());
    const auto gathered = py::reinterpret_steal<py::object>(call_python(allgather_.ptr(), own.ptr()));
    if (!gathered) throw py::error_already_set();
    for (py::handle item : gathered) all.push_back(item.cast<std::string>());
    if (all.size() != static_cast<size_t>(num_ranks_)) {
      raise(ErrorKind::kMismatch, "the group has ", num_ranks_, " ranks, but ", all.size(), " answered");
    }
    return all;
  }

 private:
  int rank_, num_ranks_;
  std::vector<int> seats_;
  py::function allgather_;
};

// A group under the name by which ops find it.
class NamedGroup {
 public:
  // `seats`: of a rank that joins a world of so many ranks, with which others it meets.
  NamedGroup(std::string name, int rank, int num_ranks, py::function allgather, const GroupConfig& config,
             const std::vector<int>& seats)
      : name_(std::move(name)) {
    const bool joins = !seats.empty();
    PythonBootstrap bootstrap = joins ? PythonBootstrap(rank, seats, std::move(allgather))
                                      : PythonBootstrap(rank, num_ranks, std::move(allgather));
    GroupConfig named = config;
    named.name = name_;
    if (joins) named.joins_world_of = num_ranks;
    const LockRelease no_lock;
    try {
      group_ = make_group(bootstrap, named);
    } catch (const Error&) {
      rethrow_interruption();
      throw;
    }
    id_ = register_group(name_, group_);
  }
  ~NamedGroup() { destroy(); }
  void destroy() {
    if (getpid() != process_) leave();  // a fork: threads to join are not here
    if (is_left_) return;
    const bool is_end = is_interpreter_ending();
    const LockRelease no_lock;
    const std::shared_ptr<Registered> last = unregister_group(id_);
    if (is_end && last.use_count() > 1) return leave();  // a daemon thread is in a call: nobody can end it any more
    group_->destroy();  // first: a failed buffer's kernels end, and `last` waits for them before it frees its pool
  }
  Group& group() { return *group_; }
  int64_t id() const { return id_; }
  void clean_masks(py::function allgather) {
    PythonBootstrap bootstrap(group_->rank(), group_->num_ranks(), std::move(allgather));
    const LockRelease no_lock;
    try {
      group_->clean_masks(bootstrap);
    } catch (const Error&) {
      rethrow_interruption();
      throw;
    }
  }
  void replace(int rank, const std::vector<int>& seats, double seconds, py::function allgather) {
    PythonBootstrap bootstrap(group_->rank(), seats, std::move(allgather));
    const LockRelease no_lock;
    group_->replace(bootstrap, rank, seconds);
  }

 private:
  // The process ends with the group as it is.
  void leave() {
    if (!std::exchange(is_left_, true)) static_cast<void>(new std::shared_ptr<Group>(group_));
  }

  std::string name_;
  int64_t id_ = 0;
  pid_t process_ = getpid();
  bool is_left_ = false;
  std::shared_ptr<Group> group_;
};

HtSizes ht_sizes_of(const std::array<uint64_t, 6>& sizes) {
  return {sizes[0], sizes[1], sizes[2], sizes[3], sizes[4], sizes[5]};
}

GroupConfig make_config(int device_index, int domain_size, uint64_t tagged_bytes, uint64_t dispatch_row_bytes,
                        uint64_t combine_row_bytes, uint64_t unweighted_row_bytes, double timeout_seconds,
                        uint64_t network_seed, const std::array<uint64_t, 6>& ht_sizes, bool masks_late_ranks,
                        const std::string& ll_network, bool raises_invalid_ids, int max_experts,
                        const std::string& made_with, bool is_elastic, bool uses_cumem) {
  GroupConfig config;
  config.ht_sizes = ht_sizes_of(ht_sizes);
  config.device_index = device_index;
  config.domain_size = domain_size;
  config.sizes.tagged_bytes = tagged_bytes;
  config.sizes.row_bytes[0] = dispatch_row_bytes;
  config.sizes.row_bytes[1] = combine_row_bytes;
  config.sizes.unweighted_row_bytes = unweighted_row_bytes;
  config.timeout_seconds = timeout_seconds;
  config.network_seed = network_seed;
  config.masks_late_ranks = masks_late_ranks;
  config.ll_network = ll_network_of(ll_network);
  config.raises_invalid_ids = raises_invalid_ids;
  config.max_experts = max_experts;
  config.made_with = made_with;
  config.is_elastic = is_elastic;
  config.uses_cumem = uses_cumem;
  return config;
}

py::tuple as_tuple(const LlSizes& sizes) {
  return py::make_tuple(sizes.tagged_bytes, sizes.row_bytes[0], sizes.row_bytes[1], sizes.unweighted_row_bytes);
}

void translate(std::exception_ptr pointer) {
  try {
    if (pointer) std::rethrow_exception(pointer);
  } catch (const Error& error) {
    set_in_python(error);
  }
}

// Whether all that follow the first tensor are None, or plain tensors where that one is.
bool all_on_same_device(PyObject* const* given, Py_ssize_t count) {
  TORCH_CHECK_TYPE(count > 0 && THPVariable_CheckExact(given[0]), "the first argument must be a tensor");
  const at::Tensor& seq = THPVariable_Unpack(given[0]);
  return std::all_of(given + 1, given + count, [&](PyObject* each) {
    if (each == Py_None) return true;
    return THPVariable_CheckExact(each) && call::is_beside(seq, THPVariable_Unpack(each));
  });
}

PyObject* on_same_device(PyObject*, PyObject* const* given, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  return PyBool_FromLong(all_on_same_device(given, count));
  END_HANDLE_TH_ERRORS
}

PyMethodDef fast_method(const char* name, PyObject* (*function)(PyObject*, PyObject* const*, Py_ssize_t)) {
  return {name, reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function)), METH_FASTCALL, nullptr};
}
PyMethodDef checks[] = {fast_method("on_same_device", &on_same_device)};

py::object fast_op(const std::string& name, const py::object& usual, bool packed) {
  for (const std::span<fast_call::Op> ops : fast_call::all_ops()) {
    for (fast_call::Op& op : ops) {
      if (name != op.method.ml_name) continue;
      PyMethodDef* method = packed ? &op.packed : &op.method;
      return py::reinterpret_steal<py::object>(PyCFunction_New(method, usual.ptr()));
    }
  }
  raise(ErrorKind::kInvalidArgument, "there is no op ", name);
}

std::vector<std::string> op_names() {
  std::vector<std::string> names;
  for (const std::span<fast_call::Op> ops : fast_call::all_ops()) {
    for (const fast_call::Op& op : ops) names.emplace_back(op.method.ml_name);
  }
  return names;
}

void define_build_info(py::module_& m) {
  // The text stands in the file too, where extension.py reads it if the file cannot be loaded.
  m.attr("BUILD") = "nccl_ep_build|torch=" EP_BUILD_TORCH "|cuda=" EP_BUILD_CUDA "|architectures=" EP_BUILD_ARCHS "|";
  m.def("has_cuda", &has_cuda_backend, "Whether this build holds the CUDA backend.");
  m.def("why_no_cuda", &why_no_cuda, "The sentence that says why it does not, and what to do; empty where it does.");
  m.def(
      "nccl_info",
      [] {
        const NcclInfo info = nccl_info();
        return py::dict(py::arg("compiled") = info.compiled, py::arg("loaded") = info.loaded,
                        py::arg("path") = info.path, py::arg("problem") = info.problem,
                        py::arg("network") = info.network, py::arg("network_problem") = info.network_problem);
      },
      "Versions of NCCL, of the build and of the process, and why it cannot be used; the kernels for several NVLink "
      "domains, and why those cannot; empty without CUDA.");
  m.def("time_line", &take_time_line, py::arg("kernel"),
        "Builds with NCCL_EP_LAB: for each phase of the last kernel of that name, when each warp passed it, in ns.");
#if defined(EP_EMULATED_GPU)
  m.attr("EMULATES_GPU") = true;
#else
  m.attr("EMULATES_GPU") = false;
#endif
#if defined(EP_LAB)
  m.def(
      "set_gpu_testing",
      [](int device, uint64_t seed, const std::vector<std::string>& bugs, uint32_t kinds, uint32_t percent,
         bool barriers) {
        set_gpu_testing(device, {seed, bugs_named(bugs), kinds, percent, barriers});
      },
      py::arg("device"), py::arg("seed") = 0, py::arg("bugs") = std::vector<std::string>{}, py::arg("kinds") = 3u,
      py::arg("percent") = 100u, py::arg("barriers") = false,
      "Delays and planted bugs of the kernels on a GPU, which must be idle. seed 0: no delays. kinds: 1 for "
      "bugs in dispatch, 2 in combine, 3 in both. percent: of the delays' usual length. barriers: for racecheck, where "
      "a flag in shared memory hands something on.");
#endif
}

// How nccl_ep/ops.py calls the ops, and what Python checks before it does.
void define_direct_calls(py::module_& m) {
  m.def("fast_op", &fast_op, py::arg("name"), py::arg("usual"), py::arg("packed_results") = false,
        "The op without torch's parser of arguments (csrc/torch/ops/fast_call.h). usual: torch's way of calling "
        "it. together: "
        "small results share an allocation.");
  m.def("op_names", &op_names, "Of all ops, without their namespace.");
  for (PyMethodDef& check : checks) {
    m.attr(check.ml_name) = py::reinterpret_steal<py::object>(PyCFunction_New(&check, nullptr));
  }
}

void define_sizes(py::module_& m) {
  m.def(
      "sizes_for",
      [](int num_ranks, int num_experts, int topk, int max_tokens, int dispatch_row_bytes, int combine_row_bytes,
         bool on_gpu) {
        const Shape shape = Shape::make(num_ranks, num_experts, topk, max_tokens);
        return as_tuple(ll_sizes_for(shape, dispatch_row_bytes, combine_row_bytes, on_gpu));
      },
      py::arg("num_ranks"), py::arg("num_experts"), py::arg("topk"), py::arg("max_tokens"),
      py::arg("dispatch_row_bytes"), py::arg("combine_row_bytes"), py::arg("on_gpu") = false,
      "Bytes of routing, dispatched rows and combined rows in one bank. on_gpu: raises what the kernels do not serve.");
  m.def(
      "most_ll_tokens_on_gpus",
      [](int num_ranks, int num_experts, int topk) {
        return most_ll_tokens_on_gpus(Shape::make(num_ranks, num_experts, topk, 1));
      },
      "Tokens a rank that the kernels of low latency serve, in the layout that needs least.");
  m.def(
      "ll_window_bytes",
      [](int num_ranks, int rail_domain_size, const std::array<uint64_t, 4>& sizes) {
        LlSizes ll{sizes[0], {sizes[1], sizes[2]}, sizes[3]};
        ll.rail_domain_size = rail_domain_size;
        ll.link_size = rail_domain_size;
        return Window::make(num_ranks, ll, {}).bytes;
      },
      "Bytes of a window of low latency alone; over the rail between domains of so many ranks, 0: of one domain.");
  m.def(
      "ht_sizes_for",
      [](int num_ranks, int domain_size, int num_experts, int topk, int max_tokens, int dispatch_row_bytes,
         int combine_row_bytes, uint64_t arena_bytes) {
        const HtSizes sizes =
            ht_sizes_for(Topology::make(num_ranks, domain_size), Shape::make(num_ranks, num_experts, topk, max_tokens),
                         dispatch_row_bytes, combine_row_bytes, arena_bytes);
        return py::make_tuple(sizes.message_words, sizes.slot_bytes, sizes.row_bytes, sizes.route_bytes,
                              sizes.rail_bytes, sizes.arena_bytes);
      },
      "What high throughput needs: words of a call, bytes of routes, rows, crossing routes, crossing rows, arena.");
  m.def(
      "ht_window_bytes",
      [](int num_ranks, const std::array<uint64_t, 6>& sizes) {
        return Window::make(num_ranks, {}, ht_sizes_of(sizes)).bytes;
      },
      "Bytes of a window that has room for high throughput of these sizes alone.");
  m.def(
      "sizes_for_window",
      [](int num_ranks, uint64_t window_bytes) { return as_tuple(sizes_for_window(num_ranks, window_bytes)); },
      "The same for a window of the given bytes.");
  m.def(
      "window_for",
      [](int num_ranks, const std::array<uint64_t, 4>& sizes) {
        return window_for(num_ranks, {sizes[0], {sizes[1], sizes[2]}, sizes[3]});
      },
      "Bytes of a window whose split has room for these sizes.");
}

void define_group(py::module_& m) {
  py::class_<GroupConfig>(m, "GroupConfig")
      .def(py::init(&make_config), py::kw_only(), py::arg("device_index"), py::arg("domain_size"),
           py::arg("tagged_bytes"), py::arg("dispatch_row_bytes"), py::arg("combine_row_bytes"),
           py::arg("unweighted_row_bytes"), py::arg("timeout_seconds"), py::arg("network_seed"), py::arg("ht_sizes"),
           py::arg("masks_late_ranks"), py::arg("ll_network"), py::arg("raises_invalid_ids"), py::arg("max_experts"),
           py::arg("made_with"), py::arg("is_elastic"), py::arg("uses_cumem"));
  py::class_<NamedGroup>(m, "Group")
      .def(py::init<std::string, int, int, py::function, const GroupConfig&, const std::vector<int>&>(),
           py::arg("name"), py::arg("rank"), py::arg("num_ranks"), py::arg("allgather"), py::arg("config"),
           py::arg("seats"))
      .def("check", [](NamedGroup& self) { self.group().check(); })
      .def("require_usable", [](NamedGroup& self) { self.group().require_usable(); })
      .def("set_timeout", [](NamedGroup& self, double seconds) { self.group().set_timeout(seconds); })
      .def("set_pdl", [](NamedGroup& self, bool enabled) { self.group().set_pdl(enabled); })
      .def(
          "last_blocks", [](NamedGroup& self) { return self.group().backend()->last_blocks(); },
          "CUDA: thread blocks of the last dispatch's and the last combine's kernel; 0 where there was none.")
      .def(
          "last_plans", [](NamedGroup& self) { return self.group().backend()->last_plans(); },
          "CUDA: how those kernels were laid over the GPU, in words; empty where there was none.")
      .def(
          "mask",
          [](NamedGroup& self, int rank, uintptr_t stream) {
            self.group().mask(rank, reinterpret_cast<void*>(stream));
          },
          py::arg("rank"), py::arg("stream"), "Low latency leaves the rank out, behind what is on the stream.")
      .def(
          "update_masks",
          [](NamedGroup& self, const std::vector<int>& ranks, uintptr_t stream) {
            RankMask masked;
            for (const int rank : ranks) {
              EP_CHECK(rank >= 0 && rank < self.group().num_ranks(), "rank ", rank, " of ", self.group().num_ranks());
              masked.add(rank);
            }
            self.group().update_masks(masked, reinterpret_cast<void*>(stream));
          },
          py::arg("ranks"), py::arg("stream"),
          "Masks these. Others that are masked count as active until the next operation masks them again.")
      .def(
          "query_masks",
          [](NamedGroup& self, uintptr_t status, uintptr_t stream) {
            self.group().query_masks(reinterpret_cast<int32_t*>(status), reinterpret_cast<void*>(stream));
          },
          py::arg("status"), py::arg("stream"), "Writes int32 [R] at that address: 1 for a masked rank, else 0.")
      .def("clean_masks", &NamedGroup::clean_masks, py::arg("allgather"),
           "Collective of the ranks that come; of several domains, of all, which gather.")
      .def("replace", &NamedGroup::replace, py::arg("rank"), py::arg("seats"), py::arg("seconds"), py::arg("allgather"),
           "Collective among the ranks in `seats`, in which order they give their bytes; the last is the new one.")
      .def(
          "check_opaque_rows",
          [](NamedGroup& self, int num_experts, int topk, int max_tokens, int64_t row_bytes) {
            self.group().check_opaque_rows({self.group().num_ranks(), num_experts, topk, max_tokens}, row_bytes);
          },
          py::arg("num_experts"), py::arg("topk"), py::arg("max_tokens"), py::arg("row_bytes"),
          "ValueError if a low-latency dispatch could not send rows of so many bytes, none of them a number.")
      .def("id", &NamedGroup::id, "By which ops find it: the length of the first dimension of their tensor `seq`.")
      .def("domain_size", [](NamedGroup& self) { return self.group().topology().domain_size; })
      .def("stats", [](NamedGroup& self) { return stats(self.group()); })
      .def(
          "arena_offset",
          [](NamedGroup& self, uint64_t address, uint64_t bytes) -> std::optional<uint64_t> {
            const auto arena = self.group().arena();
            if (arena == nullptr) return std::nullopt;
            const Offset offset = arena->offset_of(reinterpret_cast<const void*>(address), bytes);
            return offset == kNoOffset ? std::nullopt : std::optional<uint64_t>(offset);
          },
          py::arg("address"), py::arg("bytes"), "Where in the window memory of the arena lies; None: not there.")
      .def("wire_bytes", [](NamedGroup& self) { return wire_bytes(self.group()); })
      .def("destroy", &NamedGroup::destroy);
}

#if defined(EP_WITH_CUDA)
std::unique_ptr<NetworkProbe> make_probe(int rank, int num_ranks, py::function allgather, int device, int domain_size,
                                         uint64_t window_bytes, int num_contexts, double seconds) {
  PythonBootstrap bootstrap(rank, num_ranks, std::move(allgather));
  const LockRelease no_lock;
  try {
    Session session(bootstrap, Collective::kMakeBuffer);
    return std::make_unique<NetworkProbe>(session, device, Topology::make(num_ranks, domain_size), window_bytes,
                                          num_contexts, seconds);
  } catch (const Error&) {
    rethrow_interruption();
    throw;
  }
}

py::bytes read_probe(NetworkProbe& probe, uint64_t offset, uint64_t bytes) {
  std::string data(bytes, '\0');
  {
    const LockRelease no_lock;
    probe.read(offset, data.data(), bytes);
  }
  return data;
}

double exchange_probe(NetworkProbe& probe, std::vector<int> peers, int messages, uint64_t bytes, uint64_t source,
                      uint64_t target, int rounds, int warm_up, double seconds) {
  const LockRelease no_lock;
  return probe.exchange({std::move(peers), messages, bytes, 0, source, target, rounds, warm_up, seconds});
}

void enqueue_probe(NetworkProbe& probe, std::vector<int> peers, int messages, uint64_t bytes, uint64_t first_bytes,
                   uint64_t source, uint64_t target, double seconds, uint64_t stream) {
  const LockRelease no_lock;
  probe.enqueue({std::move(peers), messages, bytes, first_bytes, source, target, 1, 0, seconds},
                reinterpret_cast<cudaStream_t>(stream));
}

void define_network_probe(py::module_& m) {
  py::class_<NetworkProbe>(m, "NetworkProbe", "A window over NCCL with its network, and puts without an operation.")
      .def(py::init(&make_probe), py::kw_only(), py::arg("rank"), py::arg("num_ranks"), py::arg("allgather"),
           py::arg("device"), py::arg("domain_size"), py::arg("window_bytes"), py::arg("num_contexts"),
           py::arg("seconds"))
      .def(
          "write",
          [](NetworkProbe& self, uint64_t offset, std::string_view data) {
            self.write(offset, data.data(), data.size());
          },
          py::arg("offset"), py::arg("data"))
      .def("read", &read_probe, py::arg("offset"), py::arg("bytes"))
      .def("exchange", &exchange_probe, py::kw_only(), py::arg("peers"), py::arg("messages"), py::arg("bytes"),
           py::arg("source"), py::arg("target"), py::arg("rounds") = 1, py::arg("warm_up") = 0,
           py::arg("seconds") = 10.0,
           "All ranks: sends the messages to each peer and waits for theirs, in every round. Returns ns a round.")
      .def("enqueue", &enqueue_probe, py::kw_only(), py::arg("peers"), py::arg("messages"), py::arg("bytes"),
           py::arg("first_bytes"), py::arg("source"), py::arg("target"), py::arg("seconds"), py::arg("stream"),
           "All ranks: one round, on the stream. `first_bytes`: of the first message, which is the smaller one.")
      .def("check", &NetworkProbe::check, "Raises what has gone wrong in a round that was enqueued and has run.")
      .def("backend", [](NetworkProbe& self) { return gin_backend_name(self.backend()); })
      .def("versions", [](NetworkProbe& self) {
        return py::make_tuple(nccl_version_name(self.nccl_version()), nccl_version_name(self.kernel_nccl_version()));
      });
}
#endif

}  // namespace
}  // namespace ep

PYBIND11_MODULE(_C, m) {
  using namespace ep;
  py::register_exception_translator(&translate);
  watch_signals();
  define_build_info(m);
  define_direct_calls(m);
  define_policy(m);
  define_sizes(m);
  define_group(m);
  define_observer(m);
#if defined(EP_WITH_CUDA)
  define_network_probe(m);
#endif
  call::define(m);
}
