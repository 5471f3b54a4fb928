// A device of torch's (PrivateUse1) over the strict fake of CUDA's driver, libcuda.so.1 as
// tests/gpudirect/fake builds it: memory that the processor cannot touch, and streams on which
// things happen late. Copies within the device go on the current stream; every other operation
// waits for that stream and runs on the CPU. Memory is not given back: torch's own allocator knows
// when it may be, and this is none.
#include <ATen/EmptyTensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/util/Exception.h>
#include <dlfcn.h>
#include <torch/extension.h>

#include <thread>

namespace {

using c10::Device;
using c10::DeviceIndex;
using c10::Stream;
constexpr auto kType = c10::DeviceType::PrivateUse1;
constexpr DeviceIndex kDevices = 2;
constexpr int kStreams = 6;  // of a device: the current one at first, and a pool

void* driver() {
  static void* const library = dlopen("libcuda.so.1", RTLD_NOW);
  TORCH_CHECK(library != nullptr && dlsym(library, "fake_cuda_view") != nullptr,
              "libcuda.so.1 is not the fake driver: put tests/gpudirect/fake_cuda of the build "
              "first in LD_LIBRARY_PATH");
  return library;
}

// Calls of the driver, by name and version.
template <typename... Arguments>
int call(const char* name, int version, Arguments... arguments) {
  using Get = int (*)(const char*, void**, int, unsigned long long, int*);
  static const auto get = reinterpret_cast<Get>(dlsym(driver(), "cuGetProcAddress_v2"));
  void* entry = nullptr;
  int found = 0;
  TORCH_CHECK(get(name, &entry, version, 0, &found) == 0 && entry != nullptr, name);
  return reinterpret_cast<int (*)(Arguments...)>(entry)(arguments...);
}
template <typename... Arguments>
void must(const char* name, int version, Arguments... arguments) {
  const int result = call(name, version, arguments...);
  TORCH_CHECK(result == 0, name, " gave ", result);
}

struct Fake {
  void* context = nullptr;
  void* streams[kStreams] = {};
  int next = 0;
};

Fake& fake_of(DeviceIndex index) {
  static std::mutex mutex;
  static Fake all[kDevices];
  Fake& fake = all[index];
  const std::lock_guard lock(mutex);
  if (fake.context == nullptr) {
    int device = 0;
    must("cuInit", 2000, 0u);
    must("cuDeviceGet", 2000, &device, static_cast<int>(index));
    must("cuDevicePrimaryCtxRetain", 7000, &fake.context, device);
    must("cuCtxPushCurrent", 4000, fake.context);
    for (void*& stream : fake.streams) must("cuStreamCreateWithPriority", 5050, &stream, 1u, 0);
    void* popped = nullptr;
    must("cuCtxPopCurrent", 4000, &popped);
  }
  return fake;
}

// With its context current.
template <typename Do>
auto on(DeviceIndex index, Do&& action) {
  Fake& fake = fake_of(index);
  struct Current {
    explicit Current(void* context) { must("cuCtxPushCurrent", 4000, context); }
    ~Current() {
      void* popped = nullptr;
      call("cuCtxPopCurrent", 4000, &popped);
    }
  } const current(fake.context);
  return action(fake);
}

thread_local DeviceIndex device_now = 0;
thread_local int64_t stream_now[kDevices] = {};

Stream stream_of(DeviceIndex device, int64_t id) {
  return Stream(Stream::UNSAFE, Device(kType, device), id);
}

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kType; }
  Device exchangeDevice(Device device) const override {
    return Device(kType, std::exchange(device_now, device.has_index() ? device.index() : 0));
  }
  Device getDevice() const override { return Device(kType, device_now); }
  void setDevice(Device device) const override { device_now = device.index(); }
  void uncheckedSetDevice(Device device) const noexcept override { device_now = device.index(); }
  DeviceIndex deviceCount() const noexcept override { return kDevices; }
  Stream getStream(Device device) const override {
    const DeviceIndex index = device.has_index() ? device.index() : device_now;
    return stream_of(index, stream_now[index]);
  }
  Stream getDefaultStream(Device device) const override { return stream_of(device.index(), 0); }
  Stream getStreamFromGlobalPool(Device device, bool) const override {
    return on(device.index(), [&](Fake& fake) {
      return stream_of(device.index(), 1 + fake.next++ % (kStreams - 1));
    });
  }
  Stream exchangeStream(Stream stream) const override {
    return stream_of(stream.device_index(),
                     std::exchange(stream_now[stream.device_index()], stream.id()));
  }
  void* getStreamNativeHandle(const Stream stream) const override {
    return on(stream.device_index(), [&](Fake& fake) { return fake.streams[stream.id()]; });
  }
  void record(void** event, const Stream& stream, DeviceIndex, c10::EventFlag) const override {
    on(stream.device_index(), [&](Fake& fake) {
      if (*event == nullptr) must("cuEventCreate", 2000, event, 2u);
      must("cuEventRecord", 2000, *event, fake.streams[stream.id()]);
    });
  }
  void block(void* event, const Stream& stream) const override {
    if (event == nullptr) return;
    on(stream.device_index(),
       [&](Fake& fake) { must("cuStreamWaitEvent", 3020, fake.streams[stream.id()], event, 0u); });
  }
  bool queryEvent(void* event) const override {
    return event == nullptr ||
           on(device_now, [&](Fake&) { return call("cuEventQuery", 2000, event) == 0; });
  }
  void synchronizeEvent(void* event) const override {
    while (!queryEvent(event)) std::this_thread::yield();
  }
  void destroyEvent(void* event, DeviceIndex device) const noexcept override {
    if (event != nullptr) on(device, [&](Fake&) { call("cuEventDestroy", 4000, event); });
  }
  bool queryStream(const Stream& stream) const override {
    return on(stream.device_index(), [&](Fake& fake) {
      return call("cuStreamQuery", 2000, fake.streams[stream.id()]) == 0;
    });
  }
  // The real one blocks in the driver.
  void synchronizeStream(const Stream& stream) const override {
    while (!queryStream(stream)) std::this_thread::yield();
  }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct Allocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    static const auto make =
        reinterpret_cast<uint64_t (*)(size_t, int)>(dlsym(driver(), "fake_cuda_allocate"));
    const Device device(kType, device_now);
    // NOLINTNEXTLINE(performance-no-int-to-ptr)
    auto* const at = bytes == 0 ? nullptr : reinterpret_cast<void*>(make(bytes, device.index()));
    return {at, at, [](void*) {}, device};
  }
  c10::DeleterFnPtr raw_deleter() const override {
    return [](void*) {};
  }
  void copy_data(void*, const void*, std::size_t) const override {
    TORCH_CHECK(false, "the fake device's allocator copies nothing");
  }
};
Allocator allocator;

// The bytes of a tensor's storage, as the host sees them when its stream has come so far.
char* bytes_of(const at::Tensor& tensor) {
  static const auto view =
      reinterpret_cast<void* (*)(uint64_t, size_t)>(dlsym(driver(), "fake_cuda_view"));
  const Guard guard;
  guard.synchronizeStream(guard.getStream(tensor.device()));
  const auto& storage = tensor.storage();
  return static_cast<char*>(view(reinterpret_cast<uint64_t>(storage.data()), storage.nbytes()));
}
// A tensor of the CPU over those.
at::Tensor on_host(const at::Tensor& tensor) {
  if (tensor.numel() == 0) return at::empty(tensor.sizes(), tensor.options().device(at::kCPU));
  return at::from_blob(
      bytes_of(tensor) + tensor.storage_offset() * tensor.element_size(), tensor.sizes(),
      tensor.strides(), [](void*) {}, tensor.options().device(at::kCPU));
}

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool) {
  const bool within = from.device() == to.device() && from.dtype() == to.dtype() &&
                      from.is_contiguous() && to.is_contiguous() && from.numel() == to.numel();
  if (within && from.numel() > 0) {
    on(to.device().index(), [&](Fake& fake) {
      must("cuMemcpyAsync", 4000, reinterpret_cast<uint64_t>(to.data_ptr()),
           reinterpret_cast<uint64_t>(from.data_ptr()), static_cast<size_t>(from.nbytes()),
           fake.streams[stream_now[to.device().index()]]);
    });
  } else if (!within) {
    at::Tensor target = to.is_cpu() ? to : on_host(to);
    target.copy_(from.is_cpu() ? from : on_host(from));
  }
  return to;
}

at::Tensor empty(at::IntArrayRef sizes, std::optional<at::ScalarType> type,
                 std::optional<at::Layout>, std::optional<Device> device, std::optional<bool>,
                 std::optional<at::MemoryFormat> format) {
  const c10::DeviceGuard guard(device.value_or(Device(kType, device_now)));
  return at::detail::empty_generic(sizes, &allocator,
                                   c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                   c10::dtype_or_default(type), format);
}
at::Tensor empty_strided(at::IntArrayRef sizes, at::IntArrayRef strides,
                         std::optional<at::ScalarType> type, std::optional<at::Layout>,
                         std::optional<Device> device, std::optional<bool>) {
  const c10::DeviceGuard guard(device.value_or(Device(kType, device_now)));
  return at::detail::empty_strided_generic(sizes, strides, &allocator,
                                           c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                           c10::dtype_or_default(type));
}
at::Tensor as_strided(const at::Tensor& self, at::IntArrayRef sizes, at::IntArrayRef strides,
                      std::optional<int64_t> offset) {
  return at::native::as_strided_tensorimpl(self, sizes, strides, offset);
}
at::Tensor view(const at::Tensor& self, at::IntArrayRef sizes) {
  return at::native::view(self, sizes);
}
at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  TORCH_CHECK(from.sizes() == to.sizes(), "the fake device resizes nothing");
  return copy_from(from, to, false);
}
void fall_back(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  at::native::cpu_fallback(op, stack);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&fall_back>());
}
TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("empty.memory_format", empty);
  library.impl("empty_strided", empty_strided);
  library.impl("_copy_from", copy_from);
  library.impl("_copy_from_and_resize", copy_from_and_resize);
  library.impl("as_strided", as_strided);
  library.impl("view", view);
}

struct Hooks final : at::PrivateUse1HooksInterface {
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  DeviceIndex deviceCount() const override { return kDevices; }
  DeviceIndex getCurrentDevice() const override { return device_now; }
};

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  c10::SetAllocator(kType, &allocator);
  at::RegisterPrivateUse1HooksInterface(new Hooks);  // torch's, for good
  module.def("violations", [] {
    return reinterpret_cast<size_t (*)()>(dlsym(driver(), "fake_cuda_violations"))();
  });
  // Has this thread's work on the device go to one of its streams.
  module.def("use_stream", [](int64_t id) { stream_now[device_now] = id; });
  module.def("idle", [](int64_t id) { return Guard().queryStream(stream_of(device_now, id)); });
}

}  // namespace
