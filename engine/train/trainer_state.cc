// A trainer's state to and from the host: weights, shards of checkpoints; and evaluation.
#include <algorithm>
#include <numbers>

#include "engine/train/trainer.h"

namespace baton::engine::train {

absl::Status Trainer::gathered() {
  return gatherer_ == nullptr ? absl::OkStatus() : gatherer_->need(0, buckets_.back().end);
}

absl::Status Trainer::finish() {
  if (absl::Status status = gathered(); !status.ok()) return status;
  return view_parameters();
}

absl::Status Trainer::gather_weights() {
  if (gatherer_ == nullptr) return absl::OkStatus();
  for (size_t i = buckets_.size(); i-- > 0;) gatherer_->updated(i, parameters_.data());
  return finish();
}

absl::Status Trainer::for_state(const ShardState& state, StateVisit visit) {
  const std::vector<FlatRange> ours = owned();
  absl::Status status;
  size_t at = 0;  // of the piece in each of the state's arrays
  for (const FlatRange& piece : state.pieces) {
    const size_t last = std::min(piece.end, map_.size);  // another number of ranks pads otherwise
    if (piece.begin < last) {
      status.Update(visit(parameters_.data() + piece.begin, at, last - piece.begin));
    }
    size_t place = 0;  // of what is held here, among the moments
    for (const FlatRange& held : ours) {
      const size_t begin = std::max(piece.begin, held.begin), end = std::min(last, held.end);
      for (size_t which = 0; which < 2 && begin < end; ++which) {
        status.Update(visit(runner_->moments()[which] + place + begin - held.begin,
                            (1 + which) * state.owned() + at + begin - piece.begin, end - begin));
      }
      place += held.size();
    }
    if (!status.ok()) return status;
    at += piece.size();
  }
  return status;
}

absl::Status Trainer::save(int64_t steps, ShardState& state) {
  state.steps = steps;
  state.pieces = shard();
  const size_t size = 3 * state.owned();
  if (state.values.size() != size) state.values = AlignedArray<float>(size);
  return for_state(state, [&](const float* here, size_t there, size_t count) {
    return runner_->read(state.values.data() + there, here, count);
  });
}

absl::Status Trainer::load(const ShardState& state) {
  return for_state(state, [&](float* here, size_t there, size_t count) {
    return runner_->write(here, state.values.data() + there, count);
  });
}

absl::StatusOr<double> Trainer::held_out_bits_per_byte(int max_windows, bool rounded) {
  if (absl::Status status = finish(); !status.ok()) return status;
  FlatArray copy;
  const float* parameters = parameters_.data();
  if (rounded) {
    AlignedArray<float> values(map_.size);
    from_checkpoint(map_, checkpoint(), values.data());
    absl::StatusOr<FlatArray> made = runner_->make_array(map_.size, false);
    if (!made.ok()) return made.status();
    copy = *std::move(made);
    absl::Status status = runner_->write(copy.data(), values.data(), map_.size);
    if (!status.ok()) return status;
    parameters = copy.data();
  }
  const size_t length = static_cast<size_t>(options_.long_length);
  const size_t all = (corpus_.held_out.size() - 1) / length;
  const size_t windows = std::min(all, static_cast<size_t>(max_windows));
  // Window w is for rank w % ranks(); its sum comes back at the same place for every rank.
  const auto group = static_cast<size_t>(ranks());
  std::vector<double> mine((windows + group - 1) / group), sums(mine.size() * group);
  for (size_t i = 0; i < mine.size(); ++i) {
    const size_t w = i * group + static_cast<size_t>(rank());
    if (w >= windows) continue;
    // Spread over the text where not all of it is used.
    const size_t at = w * all / windows * length;
    const absl::StatusOr<float> loss =
        runner_->loss(parameters, std::span(corpus_.held_out).subspan(at, length + 1), 1,
                      static_cast<int>(length));
    if (!loss.ok()) return loss.status();
    mine[i] = *loss * static_cast<double>(length);
  }
  if (comm_ == nullptr) {
    sums = mine;
  } else if (absl::Status status =
                 comm_->all_gather(mine.data(), sums.data(), mine.size(), DataType::kF64);
             !status.ok()) {
    return status;
  }
  double nats = 0;
  for (size_t w = 0; w < windows; ++w) nats += sums[w % group * mine.size() + w / group];
  const double bytes_per_token =
      static_cast<double>(corpus_.held_out_bytes) / static_cast<double>(corpus_.held_out.size());
  return nats / std::numbers::ln2 /
         (static_cast<double>(windows) * static_cast<double>(length) * bytes_per_token);
}

}  // namespace baton::engine::train
