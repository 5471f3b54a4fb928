// Memory of a training pass on a GPU, what it is told, and how its ranges of gradients are
// followed.
#include "engine/train/device/device_pass.h"

#include <algorithm>
#include <cmath>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "engine/model/rope.h"

namespace baton::engine::train {
namespace {

using device::address_of;
using device::Carver;
using gpudirect::Device;
using gpudirect::DeviceSlab;
using gpudirect::RegisteredPages;

constexpr size_t kEventsOfLayer = 5;  // calls of finish_range()

}  // namespace

DevicePass::DevicePass(device::Gpu& gpu, const ParameterMap& map, int max_tokens, int max_length)
    : gpu_(gpu),
      map_(map),
      c_(map.config),
      max_tokens_(static_cast<size_t>(max_tokens)),
      max_length_(static_cast<size_t>(max_length)),
      d_(static_cast<uint32_t>(c_.hidden_size)),
      f_(static_cast<uint32_t>(c_.intermediate_size)),
      dim_(static_cast<uint32_t>(c_.head_dim)),
      group_(static_cast<uint32_t>(c_.num_heads / c_.num_kv_heads)),
      q_width_(static_cast<uint32_t>(c_.num_heads * c_.head_dim)),
      kv_width_(static_cast<uint32_t>(c_.num_kv_heads * c_.head_dim)),
      qkv_width_(q_width_ + 2 * kv_width_) {}

absl::StatusOr<std::unique_ptr<DevicePass>> DevicePass::create(device::Gpu& gpu,
                                                               const ParameterMap& map,
                                                               int max_tokens, int max_length) {
  std::unique_ptr<DevicePass> pass(new DevicePass(gpu, map, max_tokens, max_length));
  if (absl::Status status = pass->start(); !status.ok()) return status;
  return pass;
}

DevicePass::~DevicePass() {
  gpu_.wait().IgnoreError();
  gpu_.device().give_back([&] {
    for (const gpudirect::Event event : events_) gpu_.device().driver().cuEventDestroy(event);
  });
}

void DevicePass::place(Carver& carver) {
  const size_t n = max_tokens_;
  const auto array = [&](size_t width) { return carver.take<float>(n * width); };
  scratch_.layers.resize(static_cast<size_t>(c_.num_layers));
  const size_t weights = static_cast<size_t>(c_.num_heads) * max_length_;
  for (Layer& layer : scratch_.layers) {
    layer = {.input = array(d_),
             .factor1 = array(1),
             .normed1 = array(d_),
             .qkv = array(qkv_width_),
             .weights = array(weights),
             .attended = array(q_width_),
             .middle = array(d_),
             .factor2 = array(1),
             .normed2 = array(d_),
             .gate_up = array(2 * size_t{f_}),
             .active = array(f_)};
  }
  scratch_.last = array(d_);
  scratch_.last_factor = array(1);
  scratch_.last_normed = array(d_);
  scratch_.logits = array(static_cast<size_t>(c_.vocab_size));
  scratch_.d_stream = array(d_);
  scratch_.d_normed = array(d_);
  scratch_.d_wide = array(2 * size_t{f_});
  scratch_.d_active = array(f_);
  scratch_.d_qkv = array(qkv_width_);
  scratch_.d_attended = array(q_width_);
  scratch_.d_weights = array(weights);
  const size_t angles = max_length_ * static_cast<size_t>(c_.head_dim) / 2;
  scratch_.cos = carver.take<float>(angles);
  scratch_.sin = carver.take<float>(angles);
  scratch_.inputs = carver.take<uint32_t>(input_count());
}

size_t DevicePass::input_count() const {
  return 3 * max_tokens_ + static_cast<size_t>(c_.vocab_size) + 1;
}

DevicePass::Inputs DevicePass::inputs_at(uint32_t* base) const {
  return {base, base + max_tokens_, base + 2 * max_tokens_,
          base + 2 * max_tokens_ + c_.vocab_size + 1};
}

absl::Status DevicePass::start() {
  Carver measure;
  place(measure);
  auto memory =
      DeviceSlab::create(gpu_.device(), measure.used(), {.rdma = false, .shareable = false});
  if (!memory.ok()) {
    return absl::Status(
        memory.status().code(),
        absl::StrCat("no memory on the device for a pass over ", max_tokens_, " tokens, which is ",
                     measure.used() >> 20, " MiB; cut a step into more parts by --accumulate: ",
                     memory.status().message()));
  }
  memory_ = *std::move(memory);
  Carver carver(memory_->span().data);
  place(carver);
  there_ = inputs_at(scratch_.inputs);
  auto inputs = RegisteredPages::make(gpu_.device(), input_count() * sizeof(uint32_t));
  if (!inputs.ok()) return inputs.status();
  pinned_inputs_ = *std::move(inputs);
  auto losses = RegisteredPages::make(gpu_.device(), 2 * max_tokens_ * sizeof(float));
  if (!losses.ok()) return losses.status();
  pinned_losses_ = *std::move(losses);
  const RopeTable rope(c_, static_cast<int>(max_length_));
  absl::Status status = gpu_.upload(address_of(scratch_.cos), rope.cosines.data(),
                                    rope.cosines.size() * sizeof(float));
  if (status.ok()) {
    status =
        gpu_.upload(address_of(scratch_.sin), rope.sines.data(), rope.sines.size() * sizeof(float));
  }
  const Device::Current current(gpu_.device());
  if (status.ok()) status = current.status();
  const size_t events = kEventsOfLayer * static_cast<size_t>(c_.num_layers) + 2;
  while (events_.size() < events && status.ok()) {
    gpudirect::Event event = nullptr;
    status = gpu_.device().check(
        gpu_.device().driver().cuEventCreate(&event, gpudirect::kEventDisableTiming),
        "making an event for gradients");
    if (status.ok()) events_.push_back(event);
  }
  return status;
}

// And which rows of the batch each token has, so that the embedding's gradient is summed in their
// order.
absl::Status DevicePass::read_inputs(std::span<const int32_t> tokens) {
  const Inputs here = inputs_at(pinned_inputs_->as<uint32_t>());
  const size_t vocab = static_cast<size_t>(c_.vocab_size), length = call_.length;
  std::fill_n(here.begins, vocab + 1, 0u);
  for (size_t t = 0; t < call_.rows; ++t) {
    const size_t at = t / length * (length + 1) + t % length;
    here.tokens[t] = static_cast<uint32_t>(tokens[at]);
    here.targets[t] = static_cast<uint32_t>(tokens[at + 1]);
    if (here.tokens[t] >= vocab || here.targets[t] >= vocab) {
      return absl::InvalidArgumentError(absl::StrFormat(
          "token %d of the text is beyond the vocabulary of %u", tokens[at], vocab));
    }
    ++here.begins[here.tokens[t] + 1];
  }
  for (size_t v = 0; v < vocab; ++v) here.begins[v + 1] += here.begins[v];
  // Each token's end moves to its begin while its rows are put in, from the last one.
  for (size_t t = call_.rows; t-- > 0;)
    here.order[--here.begins[here.tokens[t] + 1]] = static_cast<uint32_t>(t);
  std::move(here.begins + 1, here.begins + vocab + 1, here.begins);
  here.begins[vocab] = call_.rows;
  return gpu_.copy(address_of(scratch_.inputs), pinned_inputs_->address(),
                   input_count() * sizeof(uint32_t));
}

absl::Status DevicePass::finish_range(size_t end) {
  const size_t begin = finals_.empty() ? 0 : finals_.back().end;
  const GradientSums& sums = call_.sums;
  absl::Status status;
  if (sums.sum != sums.gradients) status = add(begin, end, sums.gradients, sums.sum);
  if (!status.ok()) return status;
  finals_.push_back({end, finals_.size()});
  return gpu_.device().check(
      gpu_.device().driver().cuEventRecord(events_[finals_.back().event], gpu_.stream()),
      "recording that gradients are written");
}

absl::Status DevicePass::follow(const GradientsReady& ready) {
  size_t begin = 0;
  for (const Final& one : finals_) {
    if (absl::Status status = gpu_.wait_for(events_[one.event]); !status.ok()) return status;
    if (ready) ready(begin, one.end);
    begin = one.end;
  }
  return absl::OkStatus();
}

float DevicePass::mean_loss() const {
  const auto* const sums = pinned_losses_->as<const float>();
  double total = 0;
  for (size_t t = 0; t < call_.rows; ++t) {
    const float loss = std::log(sums[t]) - sums[max_tokens_ + t];
    total += loss;
  }
  return static_cast<float>(total / call_.rows);
}

absl::StatusOr<float> DevicePass::run(const float* parameters, std::span<const int32_t> tokens,
                                      int sequences, int length, const GradientSums& sums,
                                      const GradientsReady& ready, const ParametersNeeded& needed) {
  call_ = {parameters, sums, static_cast<uint32_t>(sequences), static_cast<uint32_t>(length),
           static_cast<uint32_t>(sequences * length)};
  finals_.clear();
  const Device::Current current(gpu_.device());
  absl::Status status = current.status();
  if (status.ok()) status = read_inputs(tokens);
  if (status.ok()) status = forward(needed);
  if (status.ok()) status = classify();
  if (status.ok() && sums.gradients != nullptr) status = backward();
  if (status.ok()) status = follow(ready);
  // Work on the stream uses the arrays, also after an error.
  const absl::Status ended = gpu_.wait();
  status.Update(ended);
  if (!status.ok()) return status;
  return mean_loss();
}

}  // namespace baton::engine::train
