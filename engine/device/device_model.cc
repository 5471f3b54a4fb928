// Memory of a model on a GPU, and what a step is told.
#include "engine/device/device_model.h"

#include <algorithm>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "engine/model/rope.h"

namespace baton::engine::device {
namespace {

using gpudirect::Device;
using gpudirect::DeviceSlab;
using gpudirect::kernels::AttentionTask;
using gpudirect::kernels::kTaskQueries;
using gpudirect::kernels::SampleRow;

constexpr size_t kMostScoreBytes = size_t{256} << 20;  // of all blocks that attend at a time
constexpr size_t kMostScoreBlocks = 1024;

size_t round_up(size_t value, size_t to) { return (value + to - 1) / to * to; }

}  // namespace

absl::StatusOr<std::string_view> device_arithmetic(Arithmetic arithmetic) {
  switch (arithmetic) {
    case Arithmetic::kFp32:
      return "fp32";
    case Arithmetic::kBf16:
      return "bf16-cuda";
    case Arithmetic::kInt8:
      break;
  }
  return absl::UnimplementedError(
      "a device computes in fp32 or bf16 arithmetic: leave out --arithmetic int8, or compute with "
      "--device cpu");
}

DeviceModel::DeviceModel(std::unique_ptr<Gpu> gpu, const Checkpoint& checkpoint,
                         Arithmetic arithmetic, absl::StatusOr<const gpudirect::CublasLt*> blas)
    : gpu_(std::move(gpu)),
      config_(checkpoint.config),
      arithmetic_(arithmetic),
      blas_(std::move(blas)) {}

absl::StatusOr<std::unique_ptr<DeviceModel>> DeviceModel::create(
    std::unique_ptr<Gpu> gpu, const Checkpoint& checkpoint, Arithmetic arithmetic,
    const absl::StatusOr<const gpudirect::CublasLt*>& blas) {
  if (auto name = device_arithmetic(arithmetic); !name.ok()) return name.status();
  std::unique_ptr<DeviceModel> model(new DeviceModel(std::move(gpu), checkpoint, arithmetic, blas));
  auto weights = DeviceWeights::upload(*model->gpu_, checkpoint);
  if (!weights.ok()) return weights.status();
  model->weights_ = *std::move(weights);
  return model;
}

DeviceModel::~DeviceModel() {
  gpu_->wait().IgnoreError();
  const Device& device = gpu_->device();
  device.give_back([&] {
    for (const gpudirect::Event event : written_) device.driver().cuEventDestroy(event);
  });
}

std::string DeviceModel::name() const {
  const gpudirect::DeviceFacts& facts = gpu_->device().facts();
  const std::string device = absl::StrCat("CUDA device ", facts.ordinal, ": ", facts.name);
  return products_ == nullptr ? device : absl::StrCat(device, "; ", products_->explain());
}

absl::StatusOr<void*> DeviceModel::allocate_cache(size_t bytes) {
  auto memory = DeviceSlab::create(gpu_->device(), bytes);
  if (!memory.ok()) {
    return absl::Status(memory.status().code(),
                        absl::StrCat("no memory for a KV cache of ", bytes >> 20,
                                     " MiB; use fewer --blocks: ", memory.status().message()));
  }
  cache_memory_ = *std::move(memory);
  return gpudirect::pointer_of<void>(cache_memory_->span().data);
}

void DeviceModel::place_scratch(Carver& carver) {
  const auto tokens = static_cast<size_t>(limits_.max_tokens);
  const auto chunks = static_cast<size_t>(limits_.max_chunks);
  const auto d = static_cast<size_t>(config_.hidden_size);
  const size_t q = size_t(config_.num_heads) * config_.head_dim;
  const size_t kv = size_t(config_.num_kv_heads) * config_.head_dim;
  const auto f = static_cast<size_t>(config_.intermediate_size);
  const size_t angles = static_cast<size_t>(limits_.max_context) * config_.head_dim / 2;
  scratch_.x = carver.take<float>(tokens * d);
  scratch_.normed = carver.take<float>(std::max(tokens, chunks) * d);
  scratch_.picked = carver.take<float>(chunks * d);
  scratch_.q = carver.take<float>(tokens * q);
  scratch_.k = carver.take<float>(tokens * kv);
  scratch_.v = carver.take<float>(tokens * kv);
  scratch_.attended = carver.take<float>(tokens * q);
  scratch_.gate_up = carver.take<float>(tokens * 2 * f);
  scratch_.hidden = carver.take<float>(tokens * f);
  scratch_.logits = carver.take<float>(chunks * static_cast<size_t>(config_.vocab_size));
  scratch_.tokens = carver.take<int32_t>(chunks);
  scratch_.scores = carver.take<float>(size_t{score_blocks_} * kTaskQueries * score_stride_);
  scratch_.cos = carver.take<float>(angles);
  scratch_.sin = carver.take<float>(angles);
  scratch_.inputs = carver.take<std::byte>(input_bytes());
}

// Room for what read_inputs() writes, at most.
size_t DeviceModel::input_bytes() const {
  const auto tokens = static_cast<size_t>(limits_.max_tokens);
  const auto chunks = static_cast<size_t>(limits_.max_chunks);
  const size_t group = static_cast<size_t>(config_.num_heads / config_.num_kv_heads);
  const size_t tables = chunks * (static_cast<size_t>(limits_.max_context) / kBlockTokens + 1);
  const size_t tasks = tokens * group / kTaskQueries + chunks;
  return (3 * tokens + tables + chunks) * sizeof(uint32_t) + tasks * sizeof(AttentionTask) +
         chunks * sizeof(SampleRow) + 7 * 16;
}

absl::Status DeviceModel::prepare(const WorkspaceLimits& limits) {
  limits_ = limits;
  if (limits_.max_context == 0) limits_.max_context = config_.max_position_embeddings;
  score_stride_ =
      static_cast<uint32_t>(round_up(static_cast<size_t>(limits_.max_context), kBlockTokens));
  const size_t each = size_t{kTaskQueries} * score_stride_ * sizeof(float);
  score_blocks_ =
      static_cast<uint32_t>(std::clamp<size_t>(kMostScoreBytes / each, 1, kMostScoreBlocks));
  Carver measure;
  place_scratch(measure);
  auto memory =
      DeviceSlab::create(gpu_->device(), measure.used(), {.rdma = false, .shareable = false});
  if (!memory.ok()) return memory.status();
  scratch_memory_ = *std::move(memory);
  Carver carver(scratch_memory_->span().data);
  place_scratch(carver);
  auto inputs = gpudirect::RegisteredPages::make(gpu_->device(), input_bytes());
  if (!inputs.ok()) return inputs.status();
  pinned_inputs_ = *std::move(inputs);
  // Behind the logits the tokens that were drawn.
  auto logits = gpudirect::RegisteredPages::make(
      gpu_->device(), sizeof(float) * static_cast<size_t>(limits_.max_chunks) *
                          (static_cast<size_t>(config_.vocab_size) + 1));
  if (!logits.ok()) return logits.status();
  pinned_logits_ = *std::move(logits);

  const RopeTable rope(config_, limits_.max_context);
  absl::Status status = gpu_->upload(address_of(scratch_.cos), rope.cosines.data(),
                                     rope.cosines.size() * sizeof(float));
  if (status.ok()) {
    status = gpu_->upload(address_of(scratch_.sin), rope.sines.data(),
                          rope.sines.size() * sizeof(float));
  }
  const Device::Current current(gpu_->device());
  if (status.ok()) status = current.status();
  for (int l = 0; l < config_.num_layers && status.ok(); ++l) {
    gpudirect::Event event = nullptr;
    status = gpu_->device().check(
        gpu_->device().driver().cuEventCreate(&event, gpudirect::kEventDisableTiming),
        "making an event for a layer");
    if (status.ok()) written_.push_back(event);
  }
  return status.ok() ? prepare_products() : status;
}

// Who multiplies each shape of the model, from now on.
absl::Status DeviceModel::prepare_products() {
  if (arithmetic_ != Arithmetic::kBf16) return absl::OkStatus();
  const int d = config_.hidden_size, f = config_.intermediate_size;
  const int q = config_.num_heads * config_.head_dim, kv = config_.num_kv_heads * config_.head_dim;
  auto products = gpudirect::GpuGemm::make(
      gpu_->device(), gpu_->launcher(), gpu_->stream(), blas_,
      static_cast<uint32_t>(std::max(limits_.max_tokens, limits_.max_chunks)),
      static_cast<uint32_t>(std::max({d, q, f})));
  if (!products.ok()) return products.status();
  products_ = *std::move(products);
  absl::Status status;
  const auto pin = [&](int n, int k, const uint16_t* w) {
    if (!status.ok()) return;
    status = products_->pin(static_cast<uint32_t>(n), static_cast<uint32_t>(k), w);
  };
  const DeviceLayer& layer = weights_.layers[0];
  pin(q, d, layer.query);
  pin(kv, d, layer.key);
  pin(d, q, layer.output);
  pin(2 * f, d, layer.gate_up);
  pin(d, f, layer.down);
  pin(config_.vocab_size, d, weights_.lm_head);
  return status;
}

template <typename T>
const T* DeviceModel::add_input(const std::vector<T>& values) {
  const size_t at = input_used_;
  if (!values.empty()) {
    std::memcpy(pinned_inputs_->as<std::byte>() + at, values.data(), values.size() * sizeof(T));
  }
  input_used_ = round_up(at + values.size() * sizeof(T), 16);
  return reinterpret_cast<const T*>(scratch_.inputs + at);
}

// Lists what the kernels have to know, and sends it to the device in one copy.
absl::Status DeviceModel::read_inputs(std::span<const SequenceChunk> chunks) {
  for (auto* list : {&ids_, &positions_, &slots_, &tables_, &rows_, &row_chunks_}) list->clear();
  tasks_.clear();
  draws_.clear();
  may_draw_.clear();
  drawn_.assign(chunks.size(), std::nullopt);
  const auto group = static_cast<uint32_t>(config_.num_heads / config_.num_kv_heads);
  for (size_t c = 0; c < chunks.size(); ++c) {
    const SequenceChunk& chunk = chunks[c];
    const auto row = static_cast<uint32_t>(ids_.size());
    const auto count = static_cast<uint32_t>(chunk.tokens.size());
    const auto position = static_cast<uint32_t>(chunk.position);
    const auto table = static_cast<uint32_t>(tables_.size());
    for (uint32_t i = 0; i < count; ++i) {
      const uint32_t at = position + i;
      ids_.push_back(static_cast<uint32_t>(chunk.tokens[i]));
      positions_.push_back(at);
      slots_.push_back(chunk.block_table[at / kBlockTokens] * kBlockTokens + at % kBlockTokens);
    }
    for (uint32_t b = 0; b <= (position + count - 1) / kBlockTokens; ++b) {
      tables_.push_back(chunk.block_table[b]);
    }
    for (uint32_t first = 0; first < count * group; first += kTaskQueries) {
      tasks_.push_back(
          {table, position, row, first, std::min(kTaskQueries, count * group - first)});
    }
    if (!chunk.wants_logits) continue;
    rows_.push_back(row + count - 1);
    row_chunks_.push_back(static_cast<uint32_t>(c));
    may_draw_.push_back(chunk.draw != nullptr);
    const DrawRule draw = chunk.draw != nullptr ? *chunk.draw : DrawRule{};
    draws_.push_back({draw.temperature, draw.top_p, draw.uniform, draw.top_k});
  }
  const bool draws = std::find(may_draw_.begin(), may_draw_.end(), true) != may_draw_.end();
  input_used_ = 0;
  inputs_ = {.tokens = static_cast<uint32_t>(ids_.size()),
             .ids = add_input(ids_),
             .positions = add_input(positions_),
             .slots = add_input(slots_),
             .tables = add_input(tables_),
             .tasks = add_input(tasks_),
             .task_count = static_cast<uint32_t>(tasks_.size()),
             .rows = add_input(rows_),
             .row_count = static_cast<uint32_t>(rows_.size()),
             .draws = draws ? add_input(draws_) : nullptr};
  return gpu_->copy(address_of(scratch_.inputs), pinned_inputs_->address(), input_used_);
}

}  // namespace baton::engine::device
