// The fake's rules, class by class: programs that break one each, and the class and the call that
// are reported.
#include "gpudirect/device_memory.h"
#include "gpudirect/kernels/arguments.h"
#include "tests/gpudirect/fake/fake_driver.h"
#include "tests/test.h"

namespace baton::gpudirect {
namespace {

// Two devices, memory of the first, of the host and of a peer, and a stream with nothing on it.
struct World {
  explicit World(FakeOptions options) : fake(std::move(options)), driver(FakeDriver::driver()) {
    device = *Device::open(driver, 0);
    other = *Device::open(driver, 1);
    slab = *DeviceSlab::create(*device, 2 * kMiB);
    at = slab->span().data;
    const Device::Current current(*device);
    driver.cuMemHostRegister(host.data(), host.size(), kHostPortable);
  }
  DevicePointer here(size_t offset = 0) const {
    return reinterpret_cast<uintptr_t>(host.data() + offset);
  }
  Stream stream() const { return device->stream(Direction::kToDevice); }
  // With the device's context current.
  void inside(const std::function<void()>& work) const {
    const Device::Current current(*device);
    work();
  }
  // The same as far as recordings go without one's having said that it has no part in them.
  void at_large(const std::function<void()>& work, int mode = kCaptureGlobal) const {
    const Device::Current current(*device);
    driver.cuThreadExchangeStreamCaptureMode(&mode);
    work();
    driver.cuThreadExchangeStreamCaptureMode(&mode);
  }
  Result copy(DevicePointer to, DevicePointer from, size_t bytes) const {
    return driver.cuMemcpyAsync(to, from, bytes, stream());
  }
  Event event() const {
    Event made = nullptr;
    driver.cuEventCreate(&made, kEventDisableTiming);
    return made;
  }
  Stream another() const {
    Stream made = nullptr;
    driver.cuStreamCreateWithPriority(&made, kStreamNonBlocking, 0);
    return made;
  }
  AllocationHandle allocation(int types = kPosixFd) const {
    AllocationProperties properties;
    properties.requested_handle_types = types;
    AllocationHandle handle = 0;
    driver.cuMemCreate(&handle, 2 * kMiB, &properties, 0);
    return handle;
  }
  int shared() const {
    AllocationHandle handle = 0;
    driver.cuMemRetainAllocationHandle(&handle, pointer_of<void>(at));
    int fd = -1;
    driver.cuMemExportToShareableHandle(&fd, handle, kPosixFd, 0);
    driver.cuMemRelease(handle);
    return fd;
  }
  int dma_buf() const {
    int fd = -1;
    driver.cuMemGetHandleForAddressRange(&fd, at, 4096, kDmaBufFd, 0);
    return fd;
  }
  AllocationHandle imported() const {
    const int fd = shared();
    AllocationHandle handle = 0;
    driver.cuMemImportFromShareableHandle(&handle, pointer_of<void>(uint64_t(fd)), kPosixFd);
    close(fd);
    return handle;
  }
  Result batch(std::vector<DevicePointer> to, std::vector<DevicePointer> from,
               std::vector<size_t> bytes, BatchAttributes attributes = {}, size_t first = 0) const {
    return driver.cuMemcpyBatchAsync(to.data(), from.data(), bytes.data(), to.size(), &attributes,
                                     &first, 1, stream());
  }
  // Two layers of two rows from the host to the device, but for what is changed.
  Result boxes(const std::function<void(BoxCopy&)>& change, size_t count = 1,
               unsigned long long flags = 0) const {
    BoxCopy box{.from = {.at = here(), .pitch = 32, .height = 2},
                .to = {.at = at, .pitch = 64, .height = 2},
                .width = 8,
                .height = 2,
                .depth = 2};
    change(box);
    std::vector<BoxCopy> all(count, box);
    for (size_t i = 0; i < count; ++i) all[i].to.at += 512 * i;
    return driver.cuMemcpy3DBatchAsync(count, all.data(), flags, stream());
  }
  // The kernel of sums, not loaded yet.
  Function kernel(Module* module) const {
    driver.cuModuleLoadData(module, FakeDriver::image().data());
    Function function = nullptr;
    driver.cuModuleGetFunction(&function, *module, "baton_reduce_sum");
    return function;
  }
  Result launch(Function function, DevicePointer from = 0, unsigned threads = 256) const {
    kernels::ReduceSum arguments{.target = pointer_of<void>(at), .count = 4, .source_count = 1};
    arguments.sources[0] = pointer_of<const void>(from != 0 ? from : at + 4096);
    void* parameters[] = {&arguments};
    return driver.cuLaunchKernel(function, 1, 1, 1, threads, 1, 1, 0, stream(), parameters,
                                 nullptr);
  }
  // A graph of one copy.
  GraphExecutable recorded() const {
    Graph graph = nullptr;
    GraphExecutable executable = nullptr;
    driver.cuStreamBeginCapture(stream(), kCaptureThreadLocal);
    copy(at, here(), 8);
    driver.cuStreamEndCapture(stream(), &graph);
    driver.cuGraphInstantiateWithFlags(&executable, graph, 0);
    driver.cuGraphDestroy(graph);
    return executable;
  }
  void ask_until_it_hangs(Event behind) const {
    for (int i = 0; i < 250'000; ++i) driver.cuEventQuery(behind);
  }

  std::vector<std::byte> host = std::vector<std::byte>(kMiB);
  FakeDriver fake;
  const Driver driver;
  std::unique_ptr<Device> device;
  std::unique_ptr<Device> other;
  std::unique_ptr<DeviceSlab> slab;
  DevicePointer at = 0;
};

struct Broken {
  Rule rule;
  const char* call;
  const char* what;
  void (*how)(World& world);
  Attributes (*attributes)() = h100;
  bool peer_access = true;
};

Attributes without_words() {
  Attributes out = h100();
  out[kStreamMemOps64] = 0;
  return out;
}

// NOLINTBEGIN(bugprone-unchecked-optional-access)
const Broken kBroken[] = {
    // ---- context ----
    {Rule::kContext, "cuMemcpyAsync", "no context", [](World& w) { w.copy(w.at, w.here(), 8); }},
    {Rule::kContext, "cuEventQuery", "no context",
     [](World& w) { w.driver.cuEventQuery(nullptr); }},
    {Rule::kContext, "cuMemcpyAsync", "in the context of device 1",
     [](World& w) {
       const Device::Current current(*w.other);
       w.copy(w.at, w.here(), 8);
     }},
    {Rule::kContext, "cuEventRecord", "in the context of device 0",
     [](World& w) {
       Event event = nullptr;
       {
         const Device::Current current(*w.other);
         event = w.event();
       }
       w.inside([&] { w.driver.cuEventRecord(event, w.stream()); });
     }},
    {Rule::kContext, "at the end", "left current",
     [](World& w) {
       Context context = nullptr;
       w.driver.cuDevicePrimaryCtxRetain(&context, 0);
       w.driver.cuCtxPushCurrent(context);
     }},
    {Rule::kContext, "cuCtxPopCurrent", "no context",
     [](World& w) {
       Context context = nullptr;
       w.driver.cuCtxPopCurrent(&context);
     }},
    {Rule::kContext, "cuCtxPushCurrent", "not retained",
     [](World& w) { w.driver.cuCtxPushCurrent(reinterpret_cast<Context>(uintptr_t{9})); }},
    {Rule::kContext, "at the end", "still retained",
     [](World& w) {
       Context context = nullptr;
       w.driver.cuDevicePrimaryCtxRetain(&context, 0);
     }},
    {Rule::kContext, "cuMemcpyAsync", "no context",
     [](World& w) {
       w.fake.lose();
       const Device::Current current(*w.device);  // which nobody looks at
       w.copy(w.at, w.here(), 8);
     }},
    // ---- lifetime ----
    {Rule::kLifetime, "cuMemUnmap", "still in use",
     [](World& w) {
       w.inside([&] { w.copy(w.at, w.here(), 8); });
       w.slab.reset();
     }},
    {Rule::kLifetime, "cuMemHostUnregister", "still in use",
     [](World& w) {
       w.inside([&] {
         w.copy(w.at, w.here(), 8);
         w.driver.cuMemHostUnregister(w.host.data());
       });
     }},
    {Rule::kLifetime, "cuMemcpyAsync", "went away",
     [](World& w) {
       w.inside([&] {
         w.copy(w.at, w.here(), 8);
         w.driver.cuMemHostUnregister(w.host.data());
       });
       w.fake.run_all();
     }},
    {Rule::kLifetime, "cuMemUnmap", "registered",
     [](World& w) {
       int fd = -1;
       w.inside([&] { fd = w.dma_buf(); });
       void* const seen = mmap(nullptr, 4096, PROT_READ, MAP_SHARED, fd, 0);
       close(fd);
       w.slab.reset();
       munmap(seen, 4096);
     }},
    {Rule::kLifetime, "cuMemUnmap", "a dma-buf",
     [](World& w) {
       w.inside([&] { w.dma_buf(); });
       w.slab.reset();
     }},
    {Rule::kLifetime, "at the end", "descriptor", [](World& w) { w.shared(); }},
    {Rule::kLifetime, "at the end", "an allocation", [](World& w) { w.allocation(); }},
    {Rule::kLifetime, "at the end", "an event", [](World& w) { w.inside([&] { w.event(); }); }},
    {Rule::kLifetime, "at the end", "a stream", [](World& w) { w.inside([&] { w.another(); }); }},
    {Rule::kLifetime, "cuMemHostUnregister", "not registered",
     [](World& w) {
       w.inside([&] {
         w.driver.cuMemHostUnregister(w.host.data());
         w.driver.cuMemHostUnregister(w.host.data());
       });
     }},
    {Rule::kLifetime, "cuMemHostRegister", "registered before",
     [](World& w) { w.inside([&] { w.driver.cuMemHostRegister(&w.host[4096], 8, 0); }); }},
    {Rule::kLifetime, "cuLaunchKernel", "a load",
     [](World& w) {
       w.inside([&] {
         Module module = nullptr;
         const Function sum = w.kernel(&module);
         w.driver.cuFuncLoad(sum);
         w.launch(sum);
       });
       w.slab.reset();
       w.fake.run_all();
     }},
    {Rule::kLifetime, "cuLaunchKernel", "a load",  // of memory of another context
     [](World& w) {
       const DevicePointer another = w.fake.allocate_in(w.fake.make_context(0), 2 * kMiB);
       w.inside([&] {
         Module module = nullptr;
         const Function sum = w.kernel(&module);
         w.driver.cuFuncLoad(sum);
         w.launch(sum, another + 4096);
       });
       w.fake.run_all();
     }},
    // ---- range ----
    {Rule::kRange, "cuMemGetHandleForAddressRange", "whole pages",
     [](World& w) {
       int fd = -1;
       w.inside([&] { w.driver.cuMemGetHandleForAddressRange(&fd, w.at + 8, 4096, kDmaBufFd, 0); });
     }},
    {Rule::kRange, "cuMemGetHandleForAddressRange", "not in one allocation",
     [](World& w) {
       int fd = -1;
       w.inside([&] { w.driver.cuMemGetHandleForAddressRange(&fd, w.at, 4 * kMiB, kDmaBufFd, 0); });
     }},
    {Rule::kRange, "cuMemGetHandleForAddressRange", "not in one allocation",
     [](World& w) {
       const DevicePointer two = w.fake.allocate_segments(2, kMiB);
       int fd = -1;
       w.inside([&] {
         w.driver.cuMemGetHandleForAddressRange(&fd, two + kMiB - 4096, 8192, kDmaBufFd, 0);
       });
       w.fake.free(two);
     }},
    {Rule::kRange, "cuMemGetHandleForAddressRange", "flags",
     [](World& w) {
       int fd = -1;
       w.inside([&] { w.driver.cuMemGetHandleForAddressRange(&fd, w.at, 4096, kDmaBufFd, 1); });
     }},
    {Rule::kRange, "cuPointerGetAttributes", "unknown",
     [](World& w) {
       auto attribute = static_cast<PointerAttribute>(77);
       int value = 0;
       void* values[] = {&value};
       w.driver.cuPointerGetAttributes(1, &attribute, values, w.at);
     }},
    // ---- mapping ----
    {Rule::kMapping, "cuMemCreate", "granularity",
     [](World& w) {
       AllocationProperties properties;
       AllocationHandle handle = 0;
       w.driver.cuMemCreate(&handle, 4096, &properties, 0);
     }},
    {Rule::kMapping, "cuMemMap", "something is mapped",
     [](World& w) {
       const AllocationHandle handle = w.allocation();
       w.driver.cuMemMap(w.at, 2 * kMiB, 0, handle, 0);
       w.driver.cuMemRelease(handle);
     }},
    {Rule::kMapping, "cuMemMap", "offset",
     [](World& w) {
       const AllocationHandle handle = w.allocation();
       w.driver.cuMemMap(w.at, 2 * kMiB, 4096, handle, 0);
       w.driver.cuMemRelease(handle);
     }},
    {Rule::kMapping, "cuMemRelease", "released before",
     [](World& w) {
       const AllocationHandle handle = w.allocation();
       w.driver.cuMemRelease(handle);
       w.driver.cuMemRelease(handle);
     }},
    {Rule::kMapping, "cuMemAddressFree", "still mapped",
     [](World& w) { w.driver.cuMemAddressFree(w.at, 2 * kMiB); }},
    {Rule::kMapping, "cuMemUnmap", "no mapping", [](World& w) { w.driver.cuMemUnmap(w.at, kMiB); }},
    {Rule::kMapping, "cuMemSetAccess", "no mapping",
     [](World& w) {
       const AccessDescription access;
       w.driver.cuMemSetAccess(w.at + kMiB, kMiB, &access, 1);
     }},
    // ---- sharing ----
    {Rule::kSharing, "cuMemImportFromShareableHandle", "no descriptor of an allocation",
     [](World& w) {
       const int fd = open("/proc/self/exe", O_RDONLY | O_CLOEXEC);
       AllocationHandle handle = 0;
       w.driver.cuMemImportFromShareableHandle(&handle, pointer_of<void>(uint64_t(fd)), kPosixFd);
       close(fd);
     }},
    {Rule::kSharing, "cuMemImportFromShareableHandle", "type",
     [](World& w) {
       const int fd = w.shared();
       AllocationHandle handle = 0;
       w.driver.cuMemImportFromShareableHandle(&handle, pointer_of<void>(uint64_t(fd)), 8);
       close(fd);
     }},
    {Rule::kSharing, "cuMemExportToShareableHandle", "a peer's",
     [](World& w) {
       const AllocationHandle handle = w.imported();
       int fd = -1;
       w.driver.cuMemExportToShareableHandle(&fd, handle, kPosixFd, 0);
       w.driver.cuMemRelease(handle);
     }},
    {Rule::kSharing, "cuMemExportToShareableHandle", "flags",
     [](World& w) {
       const AllocationHandle handle = w.allocation();
       int fd = -1;
       w.driver.cuMemExportToShareableHandle(&fd, handle, kPosixFd, 1);
       w.driver.cuMemRelease(handle);
     }},
    {Rule::kSharing, "cuMemUnmap", "copied by a peer",
     [](World& w) {
       const AllocationHandle handle = w.imported();
       DevicePointer theirs = 0;
       w.driver.cuMemAddressReserve(&theirs, 2 * kMiB, 0, 0, 0);
       w.driver.cuMemMap(theirs, 2 * kMiB, 0, handle, 0);
       const AccessDescription access;
       w.driver.cuMemSetAccess(theirs, 2 * kMiB, &access, 1);
       w.inside([&] { w.copy(theirs, w.here(), 8); });
       w.slab.reset();
     }},
    {Rule::kSharing, "cuMemSetAccess", "no access to its peer",
     [](World& w) {
       const AccessDescription access{.location = {.id = 1}};
       w.driver.cuMemSetAccess(w.at, 2 * kMiB, &access, 1);
     },
     h100, false},
    {Rule::kSharing, "cuDeviceCanAccessPeer", "no peer of itself",
     [](World& w) {
       int can = 0;
       w.driver.cuDeviceCanAccessPeer(&can, 0, 0);
     }},
    {Rule::kSharing, "cuIpcGetMemHandle", "where an allocation begins",
     [](World& w) {
       const DevicePointer at = w.fake.allocate(kMiB);
       IpcHandle handle;
       w.inside([&] { w.driver.cuIpcGetMemHandle(&handle, at + 4096); });
       w.fake.free(at);
     }},
    {Rule::kSharing, "cuIpcGetMemHandle", "virtual memory management",
     [](World& w) {
       IpcHandle handle;
       w.inside([&] { w.driver.cuIpcGetMemHandle(&handle, w.at); });
     }},
    {Rule::kSharing, "cuIpcGetMemHandle", "managed",
     [](World& w) {
       const DevicePointer at = w.fake.allocate(kMiB, 0, true);
       IpcHandle handle;
       w.inside([&] { w.driver.cuIpcGetMemHandle(&handle, at); });
       w.fake.free(at);
     }},
    {Rule::kSharing, "cuIpcOpenMemHandle", "of this process",
     [](World& w) {
       const DevicePointer at = w.fake.allocate(kMiB);
       w.inside([&] {
         IpcHandle handle;
         DevicePointer theirs = 0;
         w.driver.cuIpcGetMemHandle(&handle, at);
         w.driver.cuIpcOpenMemHandle(&theirs, handle, kIpcLazyPeerAccess);
       });
       w.fake.free(at);
     }},
    {Rule::kSharing, "cuIpcOpenMemHandle", "flags",
     [](World& w) {
       DevicePointer theirs = 0;
       w.inside([&] { w.driver.cuIpcOpenMemHandle(&theirs, IpcHandle{}, 0); });
     }},
    {Rule::kSharing, "cuIpcCloseMemHandle", "nothing was opened",
     [](World& w) { w.inside([&] { w.driver.cuIpcCloseMemHandle(w.at); }); }},
    // ---- copying ----
    {Rule::kCopy, "cuMemcpyAsync", "neither",
     [](World& w) {
       char pageable[8] = {};
       w.inside([&] { w.copy(w.at, reinterpret_cast<uintptr_t>(pageable), 8); });
     }},
    {Rule::kCopy, "cuMemcpyAsync", "neither",
     [](World& w) { w.inside([&] { w.copy(w.at + 2 * kMiB - 4, w.here(), 8); }); }},
    {Rule::kCopy, "cuMemcpyAsync", "legacy stream",
     [](World& w) { w.inside([&] { w.driver.cuMemcpyAsync(w.at, w.here(), 8, nullptr); }); }},
    {Rule::kCopy, "cuMemcpyAsync", "no bytes",
     [](World& w) { w.inside([&] { w.copy(w.at, w.here(), 0); }); }},
    {Rule::kCopy, "cuMemcpyAsync", "writes what it reads",
     [](World& w) { w.inside([&] { w.copy(w.at, w.at + 4, 8); }); }},
    {Rule::kCopy, "cuMemcpyBatchAsync", "same bytes",
     [](World& w) {
       w.inside([&] { w.batch({w.at, w.at + 4}, {w.here(), w.here(64)}, {8, 8}); });
     }},
    {Rule::kCopy, "cuMemcpyBatchAsync", "what one reads",
     [](World& w) { w.inside([&] {
                      w.batch({w.at, w.at + 64}, {w.here(), w.at}, {8, 8});
                    }); }},
    {Rule::kCopy, "cuMemcpyBatchAsync", "stream's order",
     [](World& w) { w.inside([&] { w.batch({w.at}, {w.here()}, {8}, {.source_order = 3}); }); }},
    {Rule::kCopy, "cuMemcpyBatchAsync", "stream's order",
     [](World& w) { w.inside([&] { w.batch({w.at}, {w.here()}, {8}, {.source_order = 0}); }); }},
    {Rule::kCopy, "cuMemcpyBatchAsync", "indices",
     [](World& w) { w.inside([&] { w.batch({w.at}, {w.here()}, {8}, {}, 1); }); }},
    {Rule::kCopy, "cuMemcpyBatchAsync", "1025 descriptors",
     [](World& w) {
       std::vector<DevicePointer> to, from;
       for (size_t i = 0; i < 1025; ++i) {
         to.push_back(w.at + 8 * i);
         from.push_back(w.here(8 * i));
       }
       w.inside([&] { w.batch(to, from, std::vector<size_t>(1025, 8)); });
     }},
    {Rule::kCopy, "cuMemcpy3DBatchAsync", "not all of them are reachable",
     [](World& w) {  // its last row
       w.inside([&] { w.boxes([&](BoxCopy& box) { box.to.at += 2 * kMiB - 3 * 64 - 4; }); });
     }},
    {Rule::kCopy, "cuMemcpy3DBatchAsync", "not all of them are reachable",
     [](World& w) {
       static std::byte pageable[256];
       w.inside([&] {
         w.boxes([&](BoxCopy& box) { box.from.at = reinterpret_cast<uintptr_t>(pageable); });
       });
     }},
    {Rule::kCopy, "cuMemcpy3DBatchAsync", "rows overlap",
     [](World& w) { w.inside([&] { w.boxes([](BoxCopy& box) { box.to.pitch = 7; }); }); }},
    {Rule::kCopy, "cuMemcpy3DBatchAsync", "layers overlap",
     [](World& w) { w.inside([&] { w.boxes([](BoxCopy& box) { box.from.height = 1; }); }); }},
    {Rule::kCopy, "cuMemcpy3DBatchAsync", "no pointer",
     [](World& w) { w.inside([&] { w.boxes([](BoxCopy& box) { box.from.type = 2; }); }); }},
    {Rule::kCopy, "cuMemcpy3DBatchAsync", "no bytes",
     [](World& w) { w.inside([&] { w.boxes([](BoxCopy& box) { box.width = 0; }); }); }},
    {Rule::kCopy, "cuMemcpy3DBatchAsync", "no bytes",
     [](World& w) { w.inside([&] { w.boxes([](BoxCopy& box) { box.height = 0; }); }); }},
    {Rule::kCopy, "cuMemcpy3DBatchAsync", "no bytes",
     [](World& w) { w.inside([&] { w.boxes([](BoxCopy& box) { box.depth = 0; }); }); }},
    {Rule::kCopy, "cuMemcpy3DBatchAsync", "unknown flags",
     [](World& w) { w.inside([&] { w.boxes([](BoxCopy& box) { box.flags = 2; }); }); }},
    {Rule::kCopy, "cuMemcpy3DBatchAsync", "flags of the call",
     [](World& w) { w.inside([&] { w.boxes([](BoxCopy&) {}, 1, 1); }); }},
    {Rule::kCopy, "cuMemcpy3DBatchAsync", "stream's order",
     [](World& w) { w.inside([&] { w.boxes([](BoxCopy& box) { box.source_order = 3; }); }); }},
    {Rule::kCopy, "cuMemcpy3DBatchAsync", "stream's order",
     [](World& w) { w.inside([&] { w.boxes([](BoxCopy& box) { box.source_order = 0; }); }); }},
    {Rule::kCopy, "cuMemcpy3DBatchAsync", "1025 descriptors",
     [](World& w) { w.inside([&] { w.boxes([](BoxCopy&) {}, 1025); }); }},
    {Rule::kCopy, "cuMemcpy3DBatchAsync", "0 descriptors",
     [](World& w) { w.inside([&] { w.boxes([](BoxCopy&) {}, 0); }); }},
    {Rule::kCopy, "cuMemcpy3DBatchAsync", "same bytes",
     [](World& w) {  // the second box begins where the first one's second layer does
       w.inside([&] { w.boxes([](BoxCopy& box) { box.to.height = 8; }, 2); });
     }},
    {Rule::kCopy, "cuMemcpy3DBatchAsync", "what one reads",
     [](World& w) {  // its second row is what the first one writes
       w.inside([&] { w.boxes([&](BoxCopy& box) { box.from.at = w.at + 32; }); });
     }},
    {Rule::kCopy, "cuMemcpy3DBatchAsync", "legacy stream",
     [](World& w) {
       BoxCopy box{.from = {.at = w.here(), .pitch = 8, .height = 1},
                   .to = {.at = w.at, .pitch = 8, .height = 1},
                   .width = 8,
                   .height = 1,
                   .depth = 1};
       w.inside([&] { w.driver.cuMemcpy3DBatchAsync(1, &box, 0, nullptr); });
     }},
    {Rule::kCapture, "cuMemcpy3DBatchAsync", "being recorded by this thread",
     [](World& w) {
       w.inside([&] {
         w.driver.cuStreamBeginCapture(w.stream(), kCaptureThreadLocal);
         w.boxes([](BoxCopy&) {});
       });
     }},
    {Rule::kStale, "cuMemcpy3DBatchAsync", "no such stream",
     [](World& w) {
       w.inside([&] {
         BoxCopy box{.from = {.at = w.here(), .pitch = 8, .height = 1},
                     .to = {.at = w.at, .pitch = 8, .height = 1},
                     .width = 8,
                     .height = 1,
                     .depth = 1};
         const Stream stream = w.another();
         w.driver.cuStreamDestroy(stream);
         w.driver.cuMemcpy3DBatchAsync(1, &box, 0, stream);
       });
     }},
    {Rule::kCopy, "cuMemcpy2DAsync", "rows overlap",
     [](World& w) {
       PlaneCopy plane{.width = 64, .height = 2};
       plane.from.device = w.here();
       plane.to.device = w.at;
       plane.from.pitch = 64;
       plane.to.pitch = 32;
       w.inside([&] { w.driver.cuMemcpy2DAsync(&plane, w.stream()); });
     }},
    {Rule::kCopy, "cuFlushGPUDirectRDMAWrites", "scope",
     [](World& w) { w.inside([&] { w.driver.cuFlushGPUDirectRDMAWrites(0, 77); }); }},
    // ---- words ----
    {Rule::kWord, "cuStreamWaitValue64", "no memory operations",
     [](World& w) { w.inside([&] { w.driver.cuStreamWaitValue64(w.stream(), w.here(), 0, 0); }); },
     without_words},
    {Rule::kWord, "cuStreamWaitValue64", "not aligned",
     [](World& w) {
       w.inside([&] { w.driver.cuStreamWaitValue64(w.stream(), w.here(4), 0, 0); });
     }},
    {Rule::kWord, "cuStreamWriteValue64", "not registered",
     [](World& w) {
       static uint64_t word = 0;
       w.inside([&] {
         w.driver.cuStreamWriteValue64(w.stream(), reinterpret_cast<uintptr_t>(&word), 0, 0);
       });
     }},
    {Rule::kWord, "cuStreamWaitValue64", "flags",
     [](World& w) { w.inside([&] { w.driver.cuStreamWaitValue64(w.stream(), w.here(), 0, 3); }); }},
    {Rule::kWord, "cuEventQuery", "a wait for 5 at",
     [](World& w) {
       w.inside([&] {
         w.driver.cuStreamWaitValue64(w.stream(), w.here(), 5, 0);
         const Event event = w.event();
         w.driver.cuEventRecord(event, w.stream());
         w.ask_until_it_hangs(event);
       });
     }},
    {Rule::kWord, "cuEventQuery", "a wait for event",
     [](World& w) {
       w.inside([&] {  // two streams that wait for each other
         const Stream stream = w.another();
         const Event first = w.event();
         const Event second = w.event();
         w.driver.cuStreamWaitValue64(w.stream(), w.here(), 1, 0);
         w.driver.cuEventRecord(first, w.stream());
         w.driver.cuStreamWaitEvent(stream, first, 0);
         w.driver.cuEventRecord(second, stream);
         w.ask_until_it_hangs(second);
       });
     }},
    {Rule::kWord, "at the end", "streams still wait",
     [](World& w) { w.inside([&] { w.driver.cuStreamWaitValue64(w.stream(), w.here(), 5, 0); }); }},
    // ---- blocking ----
    {Rule::kBlocking, "cuMemHostRegister", "progress thread",
     [](World& w) {
       const FakeDriver::ProgressThread here;
       w.inside([&] { w.driver.cuMemHostRegister(&w, 8, 0); });
     }},
    {Rule::kBlocking, "cuMemCreate", "progress thread",
     [](World& w) {
       const FakeDriver::ProgressThread here;
       w.driver.cuMemRelease(w.allocation());
     }},
    {Rule::kBlocking, "cuModuleLoadData", "progress thread",
     [](World& w) {
       const FakeDriver::ProgressThread here;
       Module module = nullptr;
       w.inside([&] { w.kernel(&module); });
     }},
    {Rule::kBlocking, "cuModuleUnload", "progress thread",
     [](World& w) {
       Module module = nullptr;
       w.inside([&] {
         w.kernel(&module);
         const FakeDriver::ProgressThread here;
         w.driver.cuModuleUnload(module);
       });
     }},
    // ---- modules ----
    {Rule::kModule, "cuModuleLoadData", "kernels that run",
     [](World& w) {
       w.inside([&] {
         Module module = nullptr;
         const Function sum = w.kernel(&module);
         w.driver.cuFuncLoad(sum);
         w.launch(sum);
         w.kernel(&module);
       });
     }},
    {Rule::kModule, "cuLaunchKernel", "baton_reduce_sum is not loaded",
     [](World& w) {
       w.inside([&] {
         Module module = nullptr;
         w.launch(w.kernel(&module));
       });
     }},
    {Rule::kModule, "cuLaunchKernel", "wants blocks of 256",
     [](World& w) {
       w.inside([&] {
         Module module = nullptr;
         w.launch(w.kernel(&module), 0, 128);
       });
     }},
    {Rule::kModule, "cuModuleLoadData", "no fat binary",
     [](World& w) {
       Module module = nullptr;
       w.inside([&] { w.driver.cuModuleLoadData(&module, "PTX"); });
     }},
    // ---- entries ----
    {Rule::kEntry, "cuMemcpyAsync", "asked for as of 5000",
     [](World&) {
       void* entry = nullptr;
       int found = 0;
       FakeDriver::get_proc_address()("cuMemcpyAsync", &entry, 5000, 0, &found);
     }},
    {Rule::kEntry, "cuMemcpy3DBatchAsync", "asked for as of 12080",
     [](World&) {  // with one argument more
       void* entry = nullptr;
       int found = 0;
       FakeDriver::get_proc_address()("cuMemcpy3DBatchAsync", &entry, 12080, 0, &found);
     }},
    {Rule::kEntry, "cuMemcpyBatchAsync", "asked for as of 12080",
     [](World&) {  // with one argument more
       void* entry = nullptr;
       int found = 0;
       FakeDriver::get_proc_address()("cuMemcpyBatchAsync", &entry, 12080, 0, &found);
     }},
    // ---- stale ----
    {Rule::kStale, "cuStreamDestroy", "still queued",
     [](World& w) {
       w.inside([&] {
         const Stream stream = w.another();
         w.driver.cuMemcpyAsync(w.at, w.here(), 8, stream);
         w.driver.cuStreamDestroy(stream);
       });
     }},
    {Rule::kStale, "cuMemcpyAsync", "no such stream",
     [](World& w) {
       w.inside([&] {
         const Stream stream = w.another();
         w.driver.cuStreamDestroy(stream);
         w.driver.cuMemcpyAsync(w.at, w.here(), 8, stream);
       });
     }},
    {Rule::kStale, "cuEventDestroy", "still waits",
     [](World& w) {
       w.inside([&] {
         const Event event = w.event();
         w.driver.cuEventRecord(event, w.stream());
         w.driver.cuStreamWaitEvent(w.device->stream(Direction::kToHost), event, 0);
         w.driver.cuEventDestroy(event);
       });
     }},
    {Rule::kStale, "cuEventQuery", "no such event",
     [](World& w) {
       w.inside([&] {
         const Event event = w.event();
         w.driver.cuEventDestroy(event);
         w.driver.cuEventQuery(event);
       });
     }},
    {Rule::kStale, "cuModuleUnload", "still queued",
     [](World& w) {
       w.inside([&] {
         Module module = nullptr;
         const Function sum = w.kernel(&module);
         w.driver.cuFuncLoad(sum);
         w.launch(sum);
         w.driver.cuModuleUnload(module);
       });
     }},
    {Rule::kStale, "cuLaunchKernel", "no such function",
     [](World& w) {
       w.inside([&] {
         Module module = nullptr;
         const Function sum = w.kernel(&module);
         w.driver.cuModuleUnload(module);
         w.launch(sum);
       });
     }},
    // ---- capture ----
    {Rule::kCapture, "cuStreamQuery", "being recorded by this thread",
     [](World& w) {
       w.inside([&] {
         Graph graph = nullptr;
         w.driver.cuStreamBeginCapture(w.stream(), kCaptureThreadLocal);
         w.driver.cuStreamQuery(w.stream());
         if (w.driver.cuStreamEndCapture(w.stream(), &graph) != kCaptureInvalidated) return;
         w.driver.cuStreamQuery(w.stream());
       });
     }},
    {Rule::kCapture, "cuEventRecord", "being recorded by this thread",
     [](World& w) {
       w.inside([&] {
         const Event event = w.event();
         w.driver.cuStreamBeginCapture(w.stream(), kCaptureThreadLocal);
         w.driver.cuEventRecord(event, w.stream());
       });
     }},
    {Rule::kCapture, "cuMemHostRegister", "being recorded by this thread",
     [](World& w) {
       w.inside([&] {
         w.driver.cuStreamBeginCapture(w.stream(), kCaptureThreadLocal);
         w.driver.cuMemHostRegister(w.host.data(), 4096, kHostPortable);
       });
     }},
    {Rule::kCapture, "cuStreamBeginCapture", "other threads' calls would fail",
     [](World& w) { w.inside([&] { w.driver.cuStreamBeginCapture(w.stream(), 0); }); }},
    {Rule::kCapture, "at the end", "still recorded",
     [](World& w) {
       w.inside([&] { w.driver.cuStreamBeginCapture(w.stream(), kCaptureThreadLocal); });
     }},
    {Rule::kCapture, "cuMemcpyAsync", "another thread records",
     [](World& w) {
       w.inside([&] { w.driver.cuStreamBeginCapture(w.stream(), kCaptureThreadLocal); });
       std::thread([&] { w.inside([&] { w.copy(w.at, w.here(), 8); }); }).join();
     }},
    {Rule::kCapture, "cuGraphExecDestroy", "still queued",
     [](World& w) {
       w.inside([&] {
         GraphExecutable executable = w.recorded();
         w.driver.cuGraphLaunch(executable, w.stream());
         w.driver.cuGraphExecDestroy(executable);
       });
     }},
    {Rule::kCapture, "cuGraphLaunch", "no such executable",
     [](World& w) {
       w.inside([&] {
         GraphExecutable executable = w.recorded();
         w.driver.cuGraphExecDestroy(executable);
         w.driver.cuGraphLaunch(executable, w.stream());
       });
     }},
    {Rule::kCapture, "at the end", "executable graph is left",
     [](World& w) { w.inside([&] { w.recorded(); }); }},
    {Rule::kCapture, "cuThreadExchangeStreamCaptureMode", "no such mode",
     [](World& w) {
       int mode = 3;
       w.driver.cuThreadExchangeStreamCaptureMode(&mode);
     }},
    // ---- the user's ----
    {Rule::kUsers, "cuEventQuery", "spoils what the application records",
     [](World& w) {
       const FakeDriver::UsersRecording recording(w.fake);
       w.at_large([&] { w.driver.cuEventQuery(w.event()); });
     }},
    {Rule::kUsers, "cuMemHostRegister", "spoils what the application records",
     [](World& w) {
       const FakeDriver::UsersRecording recording(w.fake, true);
       w.at_large([&] { w.driver.cuMemHostRegister(w.host.data(), 8, 0); }, kCaptureThreadLocal);
     }},
    {Rule::kUsers, "cuEventRecord", "put into a graph that the application records",
     [](World& w) {
       const FakeDriver::UsersRecording recording(w.fake);
       w.inside([&] { w.driver.cuEventRecord(w.event(), recording.stream()); });
     }},
    {Rule::kUsers, "at the end", "left without care for recordings",
     [](World& w) {
       int mode = kCaptureRelaxed;
       w.driver.cuThreadExchangeStreamCaptureMode(&mode);
     }},
    {Rule::kContext, "cuMemcpyAsync", "another context of device 0",
     [](World& w) {
       Context popped = nullptr;
       w.driver.cuCtxPushCurrent(w.fake.make_context(0));
       w.copy(w.at, w.here(), 8);
       w.driver.cuCtxPopCurrent(&popped);
     }},
};
// NOLINTEND(bugprone-unchecked-optional-access)

TEST(FakeRules, EachIsReportedWithItsClassAndTheCall) {
  std::vector<int> of_class(kRules + 1);
  for (const Broken& broken : kBroken) {
    World world(
        {.devices = 2, .attributes = broken.attributes(), .peer_access = broken.peer_access});
    ASSERT_THAT(world.fake.violations(), testing::IsEmpty());
    broken.how(world);
    const std::string expected =
        std::string("[") + name_of(broken.rule) + "], " + broken.call + ", " + broken.what;
    EXPECT_THAT(
        world.fake.finish(),
        testing::Contains(testing::AllOf(
            testing::StartsWith(std::string(broken.call) + ": "), testing::HasSubstr(broken.what),
            testing::EndsWith(std::string("[") + name_of(broken.rule) + "]"))))
        << expected;
    ++of_class[static_cast<size_t>(broken.rule)];
    // What is left of it is the next one's no more.
    Context context = nullptr;
    while (FakeDriver::has_current()) world.driver.cuCtxPopCurrent(&context);
    for (int fd = 3; fd < 64; ++fd) {
      if (FakeDriver::is_device_memory(fd)) close(fd);
    }
  }
  for (int rule = 1; rule <= kRules; ++rule) {
    EXPECT_GE(of_class[static_cast<size_t>(rule)], 2) << name_of(static_cast<Rule>(rule));
  }
}

// What the world itself does breaks no rule.
TEST(FakeRules, NothingIsReportedOfWhatIsRight) {
  World world({.devices = 2});
  world.inside([&] {
    world.copy(world.at, world.here(), 8);
    world.batch({world.at + 64, world.at + 128}, {world.here(64), world.at + 256}, {8, 8});
    world.boxes([](BoxCopy&) {}, 3);
    // As the box itself is: rows and layers without gaps.
    world.boxes([](BoxCopy& box) { box.to.pitch = box.to.height = 0; });
  });
  world.fake.run_all();
  world.inside([&] { world.driver.cuMemHostUnregister(world.host.data()); });
  world.slab.reset();
  world.other.reset();
  world.device.reset();
  EXPECT_THAT(world.fake.finish(), testing::IsEmpty());
}

// Who reads its sources at the call gets what was there then.
TEST(FakeRules, SourcesInAnyOrderAreReadAtTheCall) {
  World world({.devices = 2});
  std::fill(world.host.begin(), world.host.end(), std::byte{'o'});
  world.inside([&] { world.batch({world.at}, {world.here()}, {4}, {.source_order = 3}); });
  std::fill(world.host.begin(), world.host.end(), std::byte{'n'});
  world.fake.run_all();
  EXPECT_EQ(world.fake.read(world.at, 4), "oooo");
  world.inside([&] { world.boxes([](BoxCopy& box) { box.source_order = 3; }); });
  std::fill(world.host.begin(), world.host.end(), std::byte{'m'});
  world.fake.run_all();
  EXPECT_EQ(world.fake.read(world.at + 3 * 64, 8), "nnnnnnnn");
}

}  // namespace
}  // namespace baton::gpudirect
