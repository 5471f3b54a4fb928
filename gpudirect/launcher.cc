// Loads the image of the kernels, and launches them.
#include "gpudirect/launcher.h"

#include <algorithm>

#include "absl/strings/str_cat.h"

namespace baton::gpudirect {
namespace {

constexpr int kBlocksOfMultiprocessor = 8;  // where the driver does not tell
// Blocks of few threads are launched as so many times what a device holds: those that end early
// make room (383 -> 368 us for 64 x 4096 of attention on an H200).
constexpr uint32_t kFewThreads = 128;
constexpr int kTurnsOfFew = 4;

struct KernelEntry {
  const char* name;
  uint32_t threads;
  uint32_t large_shared;  // bytes
};
constexpr KernelEntry kEntries[] = {
#define BATON_ENTRY(kernel, Arguments, threads) \
  {"baton_" #kernel, threads, kernels::large_shared_of(#kernel)},
    BATON_KERNELS(BATON_ENTRY)
#undef BATON_ENTRY
};

}  // namespace

absl::StatusOr<std::unique_ptr<Launcher>> Launcher::load(const Device& device,
                                                         absl::Span<const std::byte> image) {
  if (image.empty()) {
    return absl::UnimplementedError(
        "no kernels: nvcc was not found when this build was configured; install CUDA's toolkit and "
        "build again");
  }
  const Device::Current current(device);
  if (!current.status().ok()) return current.status();
  std::unique_ptr<Launcher> launcher(new Launcher(device));
  const Result loaded = device.driver().cuModuleLoadData(&launcher->module_, image.data());
  if (loaded != kSuccess) launcher->module_ = nullptr;
  absl::Status status = device.check(loaded, "loading the kernels");
  if (status.ok()) status = launcher->find_all();
  if (!status.ok()) {
    // For a device without room, or a lost one, the driver's own text is enough.
    const bool may_be_too_old = !absl::IsResourceExhausted(status) && !absl::IsAborted(status);
    return absl::Status(
        may_be_too_old ? absl::StatusCode::kUnimplemented : status.code(),
        absl::StrCat(
            "no kernels: ", status.message(),
            may_be_too_old
                ? "; they are for devices of compute capability 8.0, 9.0 and newer than that"
                : ""));
  }
  return launcher;
}

absl::Status Launcher::find_all() {
  const Driver& driver = device_.driver();
  const int multiprocessors = device_.facts().value(kMultiprocessorCount).value_or(1);
  absl::Status status;
  for (size_t i = 0; i < functions_.size() && status.ok(); ++i) {
    status = device_.check(driver.cuModuleGetFunction(&functions_[i], module_, kEntries[i].name),
                           kEntries[i].name);
    // More than every device has by itself is to be asked for.
    if (status.ok() && kEntries[i].large_shared != 0) {
      status = device_.check(driver.cuFuncSetAttribute(functions_[i], kMostDynamicShared,
                                                       static_cast<int>(kEntries[i].large_shared)),
                             kEntries[i].name);
    }
    // Before CUDA 12.4 finding a function loads it.
    if (status.ok() && driver.cuFuncLoad != nullptr) {
      status = device_.check(driver.cuFuncLoad(functions_[i]), kEntries[i].name);
    }
    int blocks = kBlocksOfMultiprocessor;
    if (status.ok() && driver.cuOccupancyMaxActiveBlocksPerMultiprocessor != nullptr) {
      status = device_.check(driver.cuOccupancyMaxActiveBlocksPerMultiprocessor(
                                 &blocks, functions_[i], static_cast<int>(kEntries[i].threads),
                                 kEntries[i].large_shared),
                             kEntries[i].name);
    }
    if (kEntries[i].threads <= kFewThreads) blocks *= kTurnsOfFew;
    most_blocks_[i] =
        static_cast<uint64_t>(std::max(1, blocks)) * static_cast<uint64_t>(multiprocessors);
  }
  return status;
}

Launcher::~Launcher() {
  if (module_ == nullptr) return;
  device_.give_back([&] { device_.driver().cuModuleUnload(module_); });
}

absl::Status Launcher::launch(Number kernel, const void* arguments, uint64_t blocks,
                              Stream stream) const {
  void* parameters[] = {const_cast<void*>(arguments)};
  const auto count = static_cast<unsigned>(std::clamp<uint64_t>(blocks, 1, most_blocks_[kernel]));
  return device_.check(device_.driver().cuLaunchKernel(
                           functions_[kernel], count, 1, 1, kEntries[kernel].threads, 1, 1,
                           kEntries[kernel].large_shared, stream, parameters, nullptr),
                       kEntries[kernel].name);
}

absl::Status Launcher::multiply(const kernels::Gemm& product, Stream stream) const {
  if (product.m <= kernels::kFewRows) {
    return gemm_few(product, kernels::gemm_few_blocks(product.n), stream);
  }
  return gemm(product, kernels::gemm_blocks(product.m, product.n), stream);
}

absl::Status Launcher::multiply_bf16(const kernels::Gemm& product, Stream stream) const {
  if (product.m <= kernels::kFewRows) {
    return gemm_bf16_few(product, kernels::gemm_few_blocks(product.n), stream);
  }
  absl::Status status = round_rows({.from = product.a,
                                    .to = const_cast<uint16_t*>(product.rounded),
                                    .rows = product.m,
                                    .size = product.k,
                                    .stride = product.lda},
                                   product.m, stream);
  if (!status.ok()) return status;
  return gemm_bf16(product, kernels::gemm_bf16_blocks(product.m, product.n), stream);
}

absl::Status Launcher::attend(const kernels::SplitAttention& splits, uint64_t blocks,
                              Stream stream) const {
  if (splits.group <= kernels::kNarrowGroup) return attend_splits(splits, blocks, stream);
  return attend_wide_splits(splits, blocks, stream);
}

absl::Status StreamGraph::possible(const Device& device) {
  const Driver& driver = device.driver();
  if (driver.cuStreamBeginCapture != nullptr && driver.cuStreamEndCapture != nullptr &&
      driver.cuGraphInstantiateWithFlags != nullptr && driver.cuGraphLaunch != nullptr &&
      driver.cuGraphExecDestroy != nullptr && driver.cuGraphDestroy != nullptr) {
    return absl::OkStatus();
  }
  return absl::UnavailableError(
      "this driver lacks the CUDA graphs that Baton needs: install one for CUDA 11.4 or newer");
}

absl::StatusOr<std::unique_ptr<StreamGraph>> StreamGraph::record(
    const Device& device, Stream stream, absl::FunctionRef<absl::Status()> queue) {
  if (absl::Status status = possible(device); !status.ok()) return status;
  const Device::Current current(device);
  if (!current.status().ok()) return current.status();
  const Driver& driver = device.driver();
  absl::Status status = device.check(driver.cuStreamBeginCapture(stream, kCaptureThreadLocal),
                                     "recording a CUDA graph");
  if (!status.ok()) return status;
  status = queue();
  Graph graph = nullptr;
  // Also of what failed: the stream would go on recording.
  const Result ended = driver.cuStreamEndCapture(stream, &graph);
  if (status.ok()) status = device.check(ended, "ending the recording of a CUDA graph");
  std::unique_ptr<StreamGraph> out(new StreamGraph(device));
  if (status.ok()) {
    const Result made = driver.cuGraphInstantiateWithFlags(&out->executable_, graph, 0);
    if (made != kSuccess) out->executable_ = nullptr;
    status = device.check(made, "making a CUDA graph ready");
  }
  if (graph != nullptr) device.give_back([&] { driver.cuGraphDestroy(graph); });
  if (!status.ok()) return status;
  return out;
}

StreamGraph::~StreamGraph() {
  if (executable_ == nullptr) return;
  device_.give_back([&] { device_.driver().cuGraphExecDestroy(executable_); });
}

absl::Status StreamGraph::launch(Stream stream) const {
  return device_.check(device_.driver().cuGraphLaunch(executable_, stream),
                       "launching a CUDA graph");
}

}  // namespace baton::gpudirect
