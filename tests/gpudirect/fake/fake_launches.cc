// The fake's modules and launches: a kernel is the emulated one of its name, and runs when its
// stream comes to it.
#include "absl/strings/str_cat.h"
#include "tests/gpudirect/fake/entries.h"
#include "tests/std.h"

namespace baton::gpudirect {
namespace {

constexpr uint32_t kFatBinary = 0xba55ed50;
constexpr int kSharedOfBlock = 163 << 10;  // of compute capability 8.0, on request

}  // namespace

// What a kernel may touch: accessible device memory, and registered memory of the host. Nothing is
// mapped or unmapped while one runs, so where it touched last is kept: most of what emulated copies
// took was to look.
class FakeMemoryView : public kernels::MemoryView {
 public:
  FakeMemoryView(FakeDriver& fake, Context context) : fake_(fake), context_(context) {}
  std::byte* find(uint64_t at, size_t bytes, bool) override {
    for (const Range& range : kept_) {
      const uint64_t offset = at - range.begin;
      if (at >= range.begin && offset < range.size && bytes <= range.size - offset) {
        return range.view + offset;
      }
    }
    if (!fake_.reached_from(context_, at)) return nullptr;
    std::byte* const found = fake_.reach(at, bytes);
    if (found != nullptr) keep(at, bytes, found);
    return found;
  }

 private:
  struct Range {
    uint64_t begin = 0, size = 0;
    std::byte* view = nullptr;  // of its beginning
  };
  void keep(uint64_t at, size_t bytes, std::byte* found) {
    const auto mapping = fake_.mapping_at(at);
    Range range;
    if (mapping != fake_.mappings_.end()) {
      if (fake_.pinned(at, bytes)) return;  // a part of it, that is the host's own
      range = {mapping->first, mapping->second.size};
    } else {
      const auto pinned = std::prev(fake_.pinned_.upper_bound(at));
      range = {pinned->first, pinned->second};
    }
    range.view = found - (at - range.begin);
    kept_[next_++ % kept_.size()] = range;
  }

  FakeDriver& fake_;
  const Context context_;
  std::array<Range, 4> kept_;
  size_t next_ = 0;
};

absl::Span<const std::byte> FakeDriver::image() {
  static constexpr std::array<uint32_t, 2> kImage = {kFatBinary, 0};
  return {reinterpret_cast<const std::byte*>(kImage.data()), sizeof kImage};
}

void FakeDriver::execute(const KernelLaunch& launch) {
  FakeMemoryView view(*this, launch.context);
  const KernelFunction& function = launch.function;
  const auto wrong = kernels::emulate(function.name, function.kernel,
                                      {launch.blocks, function.kernel.threads, random_()},
                                      launch.arguments.data(), view);
  if (!wrong.has_value()) return;
  violate(Rule::kLifetime, "cuLaunchKernel", *wrong);
  lost_ = true;  // as after CUDA_ERROR_ILLEGAL_ADDRESS
}

struct FakeLaunchCalls {
  static bool launched(const FakeDriver& fake) {
    for (const auto& [stream, queue] : fake.streams_) {
      for (const auto& operation : queue) {
        if (operation.launch != nullptr) return true;
      }
    }
    return false;
  }

  static Result load(const FakeCall& call, Module* module, const void* image) {
    uint32_t magic = 0;
    if (image != nullptr) std::memcpy(&magic, image, sizeof magic);
    if (magic != kFatBinary) {
      call.violate(Rule::kModule, "the image is no fat binary");
      return kInvalidValue;
    }
    if (launched(call.fake))
      call.violate(Rule::kModule, "it waits for the kernels that run, with a lock held");
    *module = reinterpret_cast<Module>(call.fake.next_object_++);
    call.fake.modules_.insert(*module);
    call.fake.homes_[*module] = FakeDriver::current_context();
    return kSuccess;
  }

  static Result unload(const FakeCall& call, Module module) {
    if (call.fake.modules_.erase(module) == 0) {
      call.violate(Rule::kStale, "no such module");
      return kInvalidHandle;
    }
    if (launched(call.fake)) call.violate(Rule::kStale, "kernels are still queued");
    std::erase_if(call.fake.functions_,
                  [&](const auto& function) { return function.second.module == module; });
    return kSuccess;
  }

  static Result get_function(const FakeCall& call, Function* function, Module module,
                             const char* name) {
    if (!call.fake.modules_.contains(module)) {
      call.violate(Rule::kStale, "no such module");
      return kInvalidHandle;
    }
    const auto kernel = kernels::emulated_kernel(name);
    if (!kernel.has_value()) return kNotFound;
    *function = reinterpret_cast<Function>(call.fake.next_object_++);
    // Before 12.4 there is no other way to load it.
    const bool loads = call.fake.options_.version < 12040;
    call.fake.functions_[*function] = {module, name, *kernel, loads};
    return kSuccess;
  }

  static Result load_function(const FakeCall& call, Function function) {
    const auto found = call.fake.functions_.find(function);
    if (found == call.fake.functions_.end()) {
      call.violate(Rule::kModule, "no such function");
      return kInvalidHandle;
    }
    found->second.loaded = true;
    return kSuccess;
  }

  static Result resident_blocks(const FakeCall& call, int* blocks, Function function,
                                int block_threads, size_t dynamic_bytes) {
    if (!call.fake.functions_.contains(function)) {
      call.violate(Rule::kStale, "no such function");
      return kInvalidHandle;
    }
    if (block_threads <= 0 || block_threads > 1024 || dynamic_bytes > size_t{kSharedOfBlock})
      return kInvalidValue;
    *blocks = std::min(32, 2048 / block_threads);
    return kSuccess;
  }

  static Result set_attribute(const FakeCall& call, Function function, int attribute, int value) {
    const auto found = call.fake.functions_.find(function);
    if (found == call.fake.functions_.end()) {
      call.violate(Rule::kStale, "no such function");
      return kInvalidHandle;
    }
    if (attribute != kMostDynamicShared || value < 0 || value > kSharedOfBlock) {
      return kInvalidValue;
    }
    found->second.most_shared = static_cast<unsigned>(value);
    return kSuccess;
  }

  static Result launch(const FakeCall& call, Function function, unsigned grid_x, unsigned grid_y,
                       unsigned grid_z, unsigned block_x, unsigned block_y, unsigned block_z,
                       unsigned shared_bytes, Stream stream, void** parameters, void** extra) {
    const auto found = call.fake.functions_.find(function);
    auto* const queue = call.queue(stream);
    if (found == call.fake.functions_.end()) call.violate(Rule::kStale, "no such function");
    if (queue == nullptr || found == call.fake.functions_.end() ||
        !call.at_home(found->second.module)) {
      return kInvalidHandle;
    }
    for (auto& [other, kernel_of_module] : call.fake.functions_) {
      if (kernel_of_module.module != found->second.module || kernel_of_module.loaded) continue;
      call.violate(Rule::kModule, kernel_of_module.name +
                                      " is not loaded: loading it waits for the kernels that run");
      kernel_of_module.loaded = true;
    }
    const kernels::EmulatedKernel& kernel = found->second.kernel;
    if (grid_x == 0 || grid_y != 1 || grid_z != 1 || block_x != kernel.threads || block_y != 1 ||
        block_z != 1 || shared_bytes != kernel.large_shared ||
        shared_bytes > found->second.most_shared || parameters == nullptr || extra != nullptr) {
      call.violate(Rule::kModule,
                   absl::StrCat(found->second.name, " wants blocks of ", kernel.threads,
                                " threads in one dimension, ", kernel.large_shared,
                                " bytes of shared memory that it was allowed, and its arguments"));
      return kInvalidValue;
    }
    auto launch = std::make_shared<FakeDriver::KernelLaunch>();
    launch->function = found->second;
    launch->blocks = grid_x;
    launch->context = FakeDriver::current_context();
    const auto* const arguments = static_cast<const std::byte*>(parameters[0]);
    launch->arguments.assign(arguments, arguments + kernel.argument_bytes);
    queue->push_back({.number = call.fake.next_operation_++, .launch = std::move(launch)});
    return kSuccess;
  }
};

void add_fake_launch_calls(FakeEntries& out) {
  add_call<FakeLaunchCalls::load, "cuModuleLoadData", kContext | kBlocks>(out, 2000);
  add_call<FakeLaunchCalls::unload, "cuModuleUnload", kContext | kBlocks | kTakes>(out, 2000);
  add_call<FakeLaunchCalls::get_function, "cuModuleGetFunction", kContext>(out, 2000);
  add_call<FakeLaunchCalls::set_attribute, "cuFuncSetAttribute", kContext>(out, 9000);
  add_call<FakeLaunchCalls::load_function, "cuFuncLoad", kContext | kBlocks>(out, 12040);
  add_call<FakeLaunchCalls::resident_blocks, "cuOccupancyMaxActiveBlocksPerMultiprocessor",
           kContext>(out, 6050);
  add_call<FakeLaunchCalls::launch, "cuLaunchKernel", kContext>(out, 4000);
}

}  // namespace baton::gpudirect
