// The events of operations on a buffer's own stream (csrc/torch/call/stream_event.cc), on a device of torch that is
// none: it writes down what it is asked. A module of Python for tests/torch_events/checks.py.
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include "torch/call/stream_event.cc"
#include "torch/common/lock.cc"

namespace ep {

thread_local const c10::Stream *LaunchStreamScope::caller_ = nullptr, *LaunchStreamScope::stream_ = nullptr;

namespace call {
PyObject* no_event() { Py_RETURN_NONE; }
PyObject* new_overlap(PyObject* event, PyObject* extra_tensors) {
  return tuple_of(new_reference(event), new_reference(extra_tensors));
}
}  // namespace call

namespace {

constexpr auto kType = c10::DeviceType::PrivateUse1;
constexpr int64_t kRefused = 8;  // the address of memory of which the allocator takes no note

std::vector<std::string> asked;
bool refuses_events = false;
int64_t current_device = 0, current_stream = 0, num_streams = 1;

c10::Stream stream_of_id(c10::Device device, int64_t id) { return c10::Stream(c10::Stream::UNSAFE, device, id); }

struct FakeDevice : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kType; }
  c10::DeviceIndex deviceCount() const noexcept override { return 2; }
  c10::Device getDevice() const override { return {kType, static_cast<c10::DeviceIndex>(current_device)}; }
  void setDevice(c10::Device device) const override { current_device = device.index(); }
  void uncheckedSetDevice(c10::Device device) const noexcept override { current_device = device.index(); }
  c10::Device exchangeDevice(c10::Device device) const override {
    const c10::Device before = getDevice();
    setDevice(device);
    return before;
  }
  c10::Stream getDefaultStream(c10::Device device) const override { return stream_of_id(device, 0); }
  c10::Stream getStream(c10::Device device) const override { return stream_of_id(device, current_stream); }
  c10::Stream getNewStream(c10::Device device, int) const override { return stream_of_id(device, num_streams++); }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    return stream_of_id(stream.device(), std::exchange(current_stream, stream.id()));
  }
  void record(void** event, const c10::Stream& stream, c10::DeviceIndex, c10::EventFlag) const override {
    TORCH_CHECK(!refuses_events, "no event is recorded");
    if (*event == nullptr) {
      *event = new int(0);
      asked.emplace_back("create");
    }
    asked.push_back("record on " + std::to_string(stream.id()));
  }
  void block(void*, const c10::Stream& stream) const override {
    asked.push_back("block " + std::to_string(stream.id()) + " of " + std::to_string(stream.device_index()));
  }
  bool queryEvent(void*) const override { return true; }
  void synchronizeEvent(void*) const override { asked.emplace_back("synchronize"); }
  void destroyEvent(void* event, c10::DeviceIndex) const noexcept override {
    delete static_cast<int*>(event);
    asked.emplace_back("destroy");
  }
  void recordDataPtrOnStream(const c10::DataPtr& memory, const c10::Stream& stream) const override {
    const auto address = reinterpret_cast<int64_t>(memory.get());
    asked.push_back("note " + std::to_string(address) + " on " + std::to_string(stream.id()));
    TORCH_CHECK(address != kRefused, "no note is taken");
  }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, FakeDevice);

// What an operation with async_finish returns as its event: (StreamEvent, tensors).
py::object run(const py::object& stream, const py::object& tensors) {
  const call::CommStream comm(stream.ptr(), c10::Device(kType, 0));
  comm.run([] { return 0; });
  auto overlap = py::reinterpret_steal<py::object>(comm.overlap({tensors.ptr()}));
  if (!overlap) throw py::error_already_set();
  return overlap;
}

at::Tensor tensor_at(int64_t address) {
  c10::DataPtr memory(reinterpret_cast<void*>(address), c10::Device(kType, 0));
  c10::Storage storage(c10::Storage::use_byte_size_t(), 16, std::move(memory), nullptr, /*resizable=*/false);
  return at::detail::make_tensor<c10::TensorImpl>(
      std::move(storage), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), caffe2::TypeMeta::Make<float>());
}

}  // namespace
}  // namespace ep

PYBIND11_MODULE(fake_device, m) {
  m.attr("REFUSED") = ep::kRefused;
  m.def("run", &ep::run);
  m.def("tensor_at", &ep::tensor_at);
  m.def("asked", [] { return std::exchange(ep::asked, {}); });
  m.def("refuse_events", [](bool refuses) { ep::refuses_events = refuses; });
  m.def("make_current", [](int64_t device, int64_t stream) {
    ep::current_device = device;
    ep::current_stream = stream;
  });
}
