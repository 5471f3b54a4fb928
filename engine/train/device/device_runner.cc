// The arrays of a training run on a GPU, and what is done with them between two passes.
#include "engine/train/device/device_runner.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "engine/device/gpu.h"
#include "gpudirect/driver.h"

namespace baton::engine::train {
namespace {

using device::address_of;
using device::Gpu;
using gpudirect::Device;
using gpudirect::DeviceSlab;
using gpudirect::RegisteredPages;

constexpr size_t kStageBytes = 4 << 20;
constexpr uint64_t kUpdateThreads = 256;

// Memory of an array. Nothing on the stream uses it when it goes.
struct ArrayMemory {
  ArrayMemory(Gpu& on, std::unique_ptr<DeviceSlab> memory) : gpu(on), slab(std::move(memory)) {}
  ~ArrayMemory() { gpu.wait().IgnoreError(); }
  ArrayMemory(const ArrayMemory&) = delete;
  ArrayMemory& operator=(const ArrayMemory&) = delete;
  Gpu& gpu;
  std::unique_ptr<DeviceSlab> slab;
};

}  // namespace

static_assert(gpudirect::kernels::kSquaresBlock == kNormBlock);

DeviceRunner::DeviceRunner(std::unique_ptr<Gpu> gpu, const RunnerNeeds& needs)
    : gpu_(std::move(gpu)),
      map_(needs.map),
      options_(needs.optimizer),
      pieces_(needs.pieces),
      blocks_(needs.padded / kNormBlock) {}

absl::StatusOr<std::unique_ptr<DeviceRunner>> DeviceRunner::create(std::unique_ptr<Gpu> gpu,
                                                                   const RunnerNeeds& needs) {
  std::unique_ptr<DeviceRunner> runner(new DeviceRunner(std::move(gpu), needs));
  if (absl::Status status = runner->start(needs); !status.ok()) return status;
  return runner;
}

absl::Status DeviceRunner::start(const RunnerNeeds& needs) {
  auto stage = RegisteredPages::make(gpu_->device(), kStageBytes);
  if (!stage.ok()) return stage.status();
  stage_ = *std::move(stage);
  auto squares = RegisteredPages::make(gpu_->device(), blocks_ * sizeof(double));
  if (!squares.ok()) return squares.status();
  squares_ = *std::move(squares);
  size_t owned = 0;
  for (const FlatRange& piece : pieces_) {
    places_.push_back(owned);
    owned += piece.size();
  }
  for (FlatArray* moments : {&first_, &second_}) {
    absl::StatusOr<FlatArray> made = make_array(owned, false);
    if (!made.ok()) return made.status();
    *moments = *std::move(made);
  }
  auto pass = DevicePass::create(*gpu_, map_, needs.max_tokens, needs.max_length);
  if (!pass.ok()) return pass.status();
  pass_ = *std::move(pass);
  return absl::OkStatus();
}

DeviceRunner::~DeviceRunner() { gpu_->wait().IgnoreError(); }

std::string DeviceRunner::name() const {
  const gpudirect::DeviceFacts& facts = gpu_->device().facts();
  return absl::StrCat("CUDA device ", facts.ordinal, ": ", facts.name);
}

absl::StatusOr<FlatArray> DeviceRunner::make_array(size_t count, bool shared) {
  const size_t bytes = count * sizeof(float);
  auto slab = DeviceSlab::create(gpu_->device(), bytes, {.rdma = shared, .shareable = shared});
  if (!slab.ok()) {
    return absl::Status(
        slab.status().code(),
        absl::StrCat("no memory on the device for ", bytes >> 20,
                     " MiB of parameters, gradients or moments: ", slab.status().message()));
  }
  const auto memory = std::make_shared<ArrayMemory>(*gpu_, *std::move(slab));
  auto* const data = gpudirect::pointer_of<float>(memory->slab->span().data);
  const std::vector<float> zeros(std::min(count, kStageBytes / sizeof(float)));
  for (size_t at = 0; at < count; at += zeros.size()) {
    absl::Status status =
        copy_to_device(data + at, zeros.data(), std::min(zeros.size(), count - at));
    if (!status.ok()) return status;
  }
  return FlatArray::adopt(data, memory);
}

absl::Status DeviceRunner::copy_to_device(float* to, const float* from, size_t count) {
  return gpu_->upload(address_of(to), from, count * sizeof(float));
}

absl::Status DeviceRunner::write(float* to, const float* from, size_t count) {
  return copy_to_device(to, from, count);
}

absl::Status DeviceRunner::read(float* to, const float* from, size_t count) {
  constexpr size_t kSome = kStageBytes / sizeof(float);
  for (size_t at = 0; at < count; at += kSome) {
    const size_t some = std::min(kSome, count - at);
    absl::Status status =
        gpu_->copy(stage_->address(), address_of(from + at), some * sizeof(float));
    const absl::Status ended = gpu_->wait();
    status.Update(ended);
    if (!status.ok()) return status;
    std::memcpy(to + at, stage_->as<float>(), some * sizeof(float));
  }
  return absl::OkStatus();
}

absl::StatusOr<const float*> DeviceRunner::view(const float* array, size_t count) {
  view_.resize(count);
  if (absl::Status status = read(view_.data(), array, count); !status.ok()) return status;
  return view_.data();
}

absl::StatusOr<float> DeviceRunner::loss_and_gradients(
    const float* parameters, std::span<const int32_t> tokens, int sequences, int length,
    const GradientSums& sums, const GradientsReady& ready, const ParametersNeeded& needed) {
  return pass_->run(parameters, tokens, sequences, length, sums, ready, needed);
}

absl::StatusOr<float> DeviceRunner::loss(const float* parameters, std::span<const int32_t> tokens,
                                         int sequences, int length) {
  return pass_->run(parameters, tokens, sequences, length, {}, nullptr, nullptr);
}

std::span<double> DeviceRunner::squares() { return {squares_->as<double>(), blocks_}; }

absl::Status DeviceRunner::sum_squares(size_t piece, const float* gradients, float divisor) {
  const FlatRange range{pieces_[piece].begin, std::min(pieces_[piece].end, map_.size)};
  if (range.begin >= range.end) return absl::OkStatus();  // nothing but padding
  const Device::Current current(gpu_->device());
  if (!current.status().ok()) return current.status();
  auto* const squares = gpudirect::pointer_of<double>(squares_->address());
  return gpu_->launcher().sum_squares({.values = gradients + range.begin,
                                       .squares = squares + range.begin / kNormBlock,
                                       .count = range.size(),
                                       .divisor = divisor},
                                      range.size() / (32 * kNormBlock) + 1, gpu_->stream());
}

absl::Status DeviceRunner::update(size_t piece, int step, float norm, float divisor,
                                  float* parameters, const float* gradients) {
  const Device::Current current(gpu_->device());
  absl::Status status = current.status();
  const float rate = learning_rate(options_, step);
  const FlatRange& own = pieces_[piece];
  gpudirect::kernels::AdamW update{
      .divisor = divisor,
      .factor = norm > options_.clip ? options_.clip / norm : 1.0f,
      .beta1 = options_.beta1,
      .beta2 = options_.beta2,
      .correct1 = 1.0f - std::pow(options_.beta1, static_cast<float>(step + 1)),
      .correct2 = 1.0f - std::pow(options_.beta2, static_cast<float>(step + 1)),
      .epsilon = options_.epsilon,
      .rate = rate};
  for (const ParameterRange& range : map_.ranges()) {
    const size_t from = std::max(range.offset, own.begin), to = std::min(range.end(), own.end);
    if (from >= to || !status.ok()) continue;
    const size_t place = places_[piece] + from - own.begin;
    update.parameters = parameters + from;
    update.gradients = gradients + from;
    update.first = first_.data() + place;
    update.second = second_.data() + place;
    update.count = to - from;
    update.decay = range.decays ? 1.0f - rate * options_.weight_decay : 1.0f;
    status = gpu_->launcher().adamw(update, (to - from) / kUpdateThreads + 1, gpu_->stream());
  }
  return status;
}

namespace {

absl::StatusOr<std::unique_ptr<device::Gpu>> open_gpu(const TrainDevice& device, int local_rank) {
  const absl::StatusOr<const gpudirect::Driver*> driver = gpudirect::machine_driver();
  if (!driver.ok()) return driver.status();
  int ordinal = device.ordinal.value_or(0), devices = 0;
  if (!device.ordinal.has_value()) {
    const absl::Status status = gpudirect::driver_status(
        **driver, (*driver)->cuDeviceGetCount(&devices), "counting devices");
    if (!status.ok()) return status;
    if (devices > 0) ordinal = local_rank % devices;
  }
  return device::Gpu::open(**driver, ordinal);
}

absl::Status refused(const TrainDevice& device, const absl::Status& why) {
  const std::string name =
      device.ordinal.has_value() ? absl::StrCat("cuda:", *device.ordinal) : "cuda";
  return absl::Status(why.code(), absl::StrCat("--device ", name, ": ", why.message(),
                                               "; --device cpu needs none"));
}

}  // namespace

absl::StatusOr<TrainDevice> parse_train_device(std::string_view text) {
  const absl::StatusOr<std::optional<int>> ordinal = device::parse_device(text);
  if (!ordinal.ok()) return ordinal.status();
  TrainDevice out{.cuda = ordinal->has_value(), .ordinal = *ordinal};
  if (text == "cuda") out.ordinal = std::nullopt;
  return out;
}

absl::Status try_device(const TrainDevice& device, int local_rank) {
  const auto gpu = open_gpu(device, local_rank);
  return gpu.ok() ? absl::OkStatus() : refused(device, gpu.status());
}

MakeRunner run_on(const TrainDevice& device, int local_rank) {
  return [device,
          local_rank](const RunnerNeeds& needs) -> absl::StatusOr<std::unique_ptr<TrainRunner>> {
    absl::StatusOr<std::unique_ptr<device::Gpu>> gpu = open_gpu(device, local_rank);
    if (!gpu.ok()) return refused(device, gpu.status());
    return DeviceRunner::create(*std::move(gpu), needs);
  };
}

}  // namespace baton::engine::train
