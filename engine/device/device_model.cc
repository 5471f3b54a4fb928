// Memory of a model on a GPU, and what a step is told.
#include "engine/device/device_model.h"

#include <algorithm>
#include <cstring>
#include <initializer_list>

#include "absl/strings/str_cat.h"
#include "engine/kernels/aligned.h"
#include "engine/kernels/attention.h"
#include "engine/model/rope.h"

namespace baton::engine::device {

absl::StatusOr<const gpudirect::StreamGraph*> StepGraphs::of(
    const gpudirect::Device& device, gpudirect::Stream stream, const StepShape& shape,
    absl::FunctionRef<absl::Status()> queue) {
  const auto [at, first] = graphs_.try_emplace(shape);
  at->second.used = ++steps_;
  if (first) {
    // Nothing of a graph runs between two steps.
    if (graphs_.size() > kMost) {
      graphs_.erase(std::min_element(
          graphs_.begin(), graphs_.end(),
          [](const auto& a, const auto& b) { return a.second.used < b.second.used; }));
    }
    return nullptr;
  }
  if (at->second.graph == nullptr) {
    auto graph = gpudirect::StreamGraph::record(device, stream, queue);
    if (!graph.ok()) return graph.status();
    at->second.graph = *std::move(graph);
    ++recorded_;
  }
  return at->second.graph.get();
}

namespace {

using gpudirect::DeviceSlab;
using gpudirect::kernels::AttentionTask;
using gpudirect::kernels::kPageQueries;
using gpudirect::kernels::kTaskQueries;
using gpudirect::kernels::SampleRow;
using gpudirect::kernels::SplitItem;
using gpudirect::kernels::SplitTask;

constexpr size_t kMostPartialBytes = size_t{256} << 20;  // of what splits leave for their join

static_assert(gpudirect::kernels::kSplitTokens == engine::kSplitTokens);

size_t round_up(size_t value, size_t to) { return (value + to - 1) / to * to; }
size_t pieces_of(size_t all, size_t each) { return (all + each - 1) / each; }

}  // namespace

std::string_view device_arithmetic(Arithmetic arithmetic) {
  return arithmetic == Arithmetic::kBf16 ? "bf16-cuda" : "fp32";
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
  std::unique_ptr<DeviceModel> model(new DeviceModel(std::move(gpu), checkpoint, arithmetic, blas));
  auto weights = DeviceWeights::upload(*model->gpu_, checkpoint);
  if (!weights.ok()) return weights.status();
  model->weights_ = *std::move(weights);
  return model;
}

DeviceModel::~DeviceModel() {
  gpu_->wait().IgnoreError();
  graphs_.clear();
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
  graphs_.clear();
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
  scratch_.partial = carver.take<float>(gpudirect::kernels::partial_floats(
      most_splits_, static_cast<uint32_t>(config_.num_kv_heads),
      static_cast<uint32_t>(config_.num_heads / config_.num_kv_heads),
      static_cast<uint32_t>(config_.head_dim)));
  scratch_.cos = carver.take<float>(angles);
  scratch_.sin = carver.take<float>(angles);
  scratch_.inputs = carver.take<std::byte>(places_.end);
}

// Room for what read_inputs() writes, at most; pages last, of which a step copies what it has.
void DeviceModel::place_inputs() {
  const auto tokens = static_cast<size_t>(limits_.max_tokens);
  const auto chunks = static_cast<size_t>(limits_.max_chunks);
  const auto context = static_cast<size_t>(limits_.max_context);
  const auto group = static_cast<size_t>(config_.num_heads / config_.num_kv_heads);
  const size_t split_tasks = chunks * pieces_of(group, kTaskQueries);
  const size_t each = gpudirect::kernels::partial_floats(
                          1, static_cast<uint32_t>(config_.num_kv_heads),
                          static_cast<uint32_t>(group), static_cast<uint32_t>(config_.head_dim)) *
                      sizeof(float);
  most_splits_ = std::min(split_tasks * pieces_of(context, kSplitTokens),
                          std::max<size_t>(1, kMostPartialBytes / each));
  size_t used = 0;
  const auto place = [&](size_t count, size_t bytes) {
    const size_t at = used;
    used = round_up(at + count * bytes, 16);
    return at;
  };
  places_.ids = place(tokens, sizeof(uint32_t));
  places_.positions = place(tokens, sizeof(uint32_t));
  places_.slots = place(tokens, sizeof(uint32_t));
  places_.rows = place(chunks, sizeof(uint32_t));
  places_.draws = place(chunks, sizeof(SampleRow));
  places_.counts = place(2, sizeof(uint32_t));
  places_.tasks = place(tokens * group / kPageQueries + chunks, sizeof(AttentionTask));
  places_.split_tasks = place(split_tasks, sizeof(SplitTask));
  places_.items = place(most_splits_, sizeof(SplitItem));
  places_.tables = place(chunks * (context / kBlockTokens + 1), sizeof(uint32_t));
  places_.end = used;
}

absl::Status DeviceModel::prepare(const WorkspaceLimits& limits) {
  limits_ = limits;
  graphs_.clear();
  if (limits_.max_context == 0) limits_.max_context = config_.max_position_embeddings;
  place_inputs();
  Carver measure;
  place_scratch(measure);
  auto memory =
      DeviceSlab::create(gpu_->device(), measure.used(), {.rdma = false, .shareable = false});
  if (!memory.ok()) return memory.status();
  scratch_memory_ = *std::move(memory);
  Carver carver(scratch_memory_->span().data);
  place_scratch(carver);
  auto inputs = gpudirect::RegisteredPages::make(gpu_->device(), places_.end);
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
  if (status.ok()) status = prepare_layers();
  return status.ok() ? prepare_products() : status;
}

// A device without tickets tells of all layers when a step has ended.
absl::Status DeviceModel::prepare_layers() {
  auto tickets = gpudirect::LayerTickets::open(gpu_->device(), gpu_->launcher(),
                                               static_cast<uint32_t>(config_.num_layers));
  if (absl::IsUnavailable(tickets.status())) return absl::OkStatus();
  if (!tickets.ok()) return tickets.status();
  tickets_ = *std::move(tickets);
  return absl::OkStatus();
}

// Chooses what multiplies each shape of the model, from now on.
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
const T* DeviceModel::add_input(const std::vector<T>& values, size_t place) {
  if (!values.empty()) {
    std::memcpy(pinned_inputs_->as<std::byte>() + place, values.data(), values.size() * sizeof(T));
  }
  return reinterpret_cast<const T*>(scratch_.inputs + place);
}

absl::Status DeviceModel::send_inputs(size_t begin, size_t end) {
  return gpu_->copy(address_of(scratch_.inputs) + begin, pinned_inputs_->address() + begin,
                    end - begin);
}

void DeviceModel::add_chunk(const SequenceChunk& chunk) {
  const auto group = static_cast<uint32_t>(config_.num_heads / config_.num_kv_heads);
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
  // A single token's context is shared out over blocks of threads, as far as there is room for what
  // they make of it. Which kernel it is changes no bit.
  const uint32_t splits = position / kSplitTokens + 1;
  const bool split =
      count == 1 && items_.size() + splits * pieces_of(group, kTaskQueries) <= most_splits_;
  const uint32_t queries = split ? kTaskQueries : kPageQueries;
  for (uint32_t first = 0; first < count * group; first += queries) {
    const AttentionTask task{table, position, row, first, std::min(queries, count * group - first)};
    if (!split) {
      tasks_.push_back(task);
      continue;
    }
    const auto number = static_cast<uint32_t>(split_tasks_.size());
    split_tasks_.push_back({task, static_cast<uint32_t>(items_.size())});
    for (uint32_t s = 0; s < splits; ++s) items_.push_back({number, s});
    inputs_.joins |= splits > 1;
  }
}

// Lists what the kernels have to know, and sends it to the device in two copies.
absl::Status DeviceModel::read_inputs(std::span<const SequenceChunk> chunks) {
  for (auto* list : {&ids_, &positions_, &slots_, &tables_, &rows_, &row_chunks_}) list->clear();
  tasks_.clear();
  split_tasks_.clear();
  items_.clear();
  draws_.clear();
  may_draw_.clear();
  drawn_.assign(chunks.size(), std::nullopt);
  inputs_ = {};
  for (size_t c = 0; c < chunks.size(); ++c) {
    const SequenceChunk& chunk = chunks[c];
    add_chunk(chunk);
    if (!chunk.wants_logits) continue;
    rows_.push_back(static_cast<uint32_t>(ids_.size()) - 1);
    row_chunks_.push_back(static_cast<uint32_t>(c));
    may_draw_.push_back(chunk.draw != nullptr);
    const DrawRule draw = chunk.draw != nullptr ? *chunk.draw : DrawRule{};
    draws_.push_back({draw.temperature, draw.top_p, draw.uniform, draw.top_k});
  }
  const bool draws = std::find(may_draw_.begin(), may_draw_.end(), true) != may_draw_.end();
  inputs_.tokens = static_cast<uint32_t>(ids_.size());
  inputs_.ids = add_input(ids_, places_.ids);
  inputs_.positions = add_input(positions_, places_.positions);
  inputs_.slots = add_input(slots_, places_.slots);
  inputs_.tables = add_input(tables_, places_.tables);
  inputs_.tasks = add_input(tasks_, places_.tasks);
  inputs_.task_count = static_cast<uint32_t>(tasks_.size());
  inputs_.split_tasks = add_input(split_tasks_, places_.split_tasks);
  inputs_.split_task_count = static_cast<uint32_t>(split_tasks_.size());
  inputs_.items = add_input(items_, places_.items);
  inputs_.item_count = static_cast<uint32_t>(items_.size());
  inputs_.counts =
      add_input(std::vector{inputs_.item_count, inputs_.split_task_count}, places_.counts);
  inputs_.rows = add_input(rows_, places_.rows);
  inputs_.row_count = static_cast<uint32_t>(rows_.size());
  const SampleRow* const rules = add_input(draws_, places_.draws);
  inputs_.draws = draws ? rules : nullptr;
  absl::Status status = send_inputs(0, places_.items + items_.size() * sizeof(SplitItem));
  if (!status.ok()) return status;
  return send_inputs(places_.tables, places_.tables + tables_.size() * sizeof(uint32_t));
}

namespace {

// Says where weights lie; and puts them there, unless it is only to measure.
class Placer {
 public:
  Placer() = default;
  Placer(Gpu& gpu, gpudirect::DevicePointer base) : gpu_(&gpu), carver_(base) {}

  // Stacked, in bf16.
  const uint16_t* halves(std::initializer_list<const Weight*> weights) {
    size_t count = 0;
    for (const Weight* weight : weights) count += weight->data.size();
    uint16_t* const at = carver_.take<uint16_t>(count);
    size_t done = 0;
    for (const Weight* weight : weights) {
      put(at + done, weight->data.data(), weight->data.size() * sizeof(uint16_t));
      done += weight->data.size();
    }
    return at;
  }
  // Stacked, in fp32.
  const float* floats(std::initializer_list<const Weight*> weights) {
    std::vector<float> values;
    for (const Weight* weight : weights) {
      for (const uint16_t half : weight->data) values.push_back(float_from_bf16(half));
    }
    float* const at = carver_.take<float>(values.size());
    put(at, values.data(), values.size() * sizeof(float));
    return at;
  }
  const absl::Status& status() const { return status_; }
  size_t used() const { return carver_.used(); }

 private:
  void put(const void* to, const void* from, size_t bytes) {
    if (gpu_ != nullptr && status_.ok()) status_ = gpu_->upload(address_of(to), from, bytes);
  }

  Gpu* gpu_ = nullptr;
  Carver carver_;
  absl::Status status_;
};

DeviceLayer place_layer(const Checkpoint& checkpoint, int l, Placer& placer) {
  const auto weight = [&](LayerWeight kind) { return &checkpoint.layer(l, kind); };
  const auto vector = [&](LayerWeight kind) -> const float* {
    return has_weight(checkpoint.config, l, kind) ? placer.floats({weight(kind)}) : nullptr;
  };
  DeviceLayer layer;
  layer.input_norm = vector(kInputNorm);
  layer.query = placer.halves({weight(kQuery)});
  layer.key = placer.halves({weight(kKey)});
  layer.value = placer.halves({weight(kValue)});
  layer.output = placer.halves({weight(kOutput)});
  layer.post_norm = vector(kPostNorm);
  layer.gate_up = placer.halves({weight(kGate), weight(kUp)});
  layer.down = placer.halves({weight(kDown)});
  layer.query_bias = vector(kQueryBias);
  layer.key_bias = vector(kKeyBias);
  layer.value_bias = vector(kValueBias);
  layer.output_bias = vector(kOutputBias);
  if (has_weight(checkpoint.config, l, kGateBias)) {
    layer.gate_up_bias = placer.floats({weight(kGateBias), weight(kUpBias)});
  }
  layer.down_bias = vector(kDownBias);
  layer.query_norm = vector(kQueryNorm);
  layer.key_norm = vector(kKeyNorm);
  return layer;
}

DeviceWeights place(const Checkpoint& checkpoint, Placer& placer) {
  DeviceWeights weights;
  weights.embedding = placer.halves({&checkpoint.embedding()});
  for (int l = 0; l < checkpoint.config.num_layers; ++l) {
    weights.layers.push_back(place_layer(checkpoint, l, placer));
  }
  weights.final_norm = placer.floats({&checkpoint.final_norm()});
  weights.lm_head = checkpoint.config.tie_word_embeddings ? weights.embedding
                                                          : placer.halves({&checkpoint.lm_head()});
  return weights;
}

}  // namespace

absl::StatusOr<DeviceWeights> DeviceWeights::upload(Gpu& gpu, const Checkpoint& checkpoint) {
  if (absl::Status status = checkpoint.config.validate(); !status.ok()) return status;
  if (checkpoint.config.num_experts > 0) {
    return absl::UnimplementedError(
        "a mixture of experts does not run on a device yet: compute it with --device cpu");
  }
  Placer measure;
  place(checkpoint, measure);
  auto memory = gpudirect::DeviceSlab::create(gpu.device(), measure.used(),
                                              {.rdma = false, .shareable = false});
  if (!memory.ok()) return memory.status();
  Placer placer(gpu, (*memory)->span().data);
  DeviceWeights weights = place(checkpoint, placer);
  if (!placer.status().ok()) return placer.status();
  weights.memory = *std::move(memory);
  return weights;
}

}  // namespace baton::engine::device
