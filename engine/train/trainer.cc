// One step after another.
#include "engine/train/trainer.h"

#include <algorithm>
#include <numbers>

#include "absl/strings/str_format.h"

namespace baton {

absl::StatusOr<std::unique_ptr<Trainer>> Trainer::create(const TrainerOptions& options,
                                                         const Corpus& corpus, ComputePool& pool) {
  if (absl::Status status = options.model.validate(); !status.ok()) return status;
  if (options.model.vocab_size % 16 != 0) {
    return absl::InvalidArgumentError(
        absl::StrFormat("a vocabulary of %d cannot be trained: it must be a multiple of 16",
                        options.model.vocab_size));
  }
  for (int length : {options.length, options.long_length}) {
    if (length < 16 || length % 16 != 0 || options.batch_tokens % length != 0 ||
        length > options.model.max_position_embeddings) {
      return absl::InvalidArgumentError(
          absl::StrFormat("sequences of %d tokens do not divide a batch of %d, are no multiple of "
                          "16, or are longer "
                          "than the context of %d",
                          length, options.batch_tokens, options.model.max_position_embeddings));
    }
  }
  const size_t need = static_cast<size_t>(options.long_length) + 2;
  if (corpus.train.size() < need || corpus.held_out.size() < need) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "the text is too short: %u training and %u held-out tokens, each must be at least %u",
        corpus.train.size(), corpus.held_out.size(), need));
  }
  return std::unique_ptr<Trainer>(new Trainer(options, corpus, pool));
}

Trainer::Trainer(const TrainerOptions& options, const Corpus& corpus, ComputePool& pool)
    : options_(options),
      corpus_(corpus),
      map_(options.model),
      backprop_(map_, options.batch_tokens, options.long_length, pool),
      optimizer_(map_, options.optimizer, pool),
      parameters_(map_.size),
      gradients_(map_.size) {
  initialize_parameters(map_, options.seed, parameters_.data());
}

StepReport Trainer::step(int number) {
  const bool late = static_cast<float>(number) >=
                    (1.0f - options_.long_share) * static_cast<float>(options_.optimizer.steps);
  const int length = late ? options_.long_length : options_.length;
  const int sequences = options_.batch_tokens / length;
  batch_.clear();
  for (int s = 0; s < sequences; ++s) {
    const auto window = corpus_.sample(options_.seed, number, s, length);
    batch_.insert(batch_.end(), window.begin(), window.end());
  }
  StepReport report;
  report.step = number;
  report.loss = backprop_.loss_and_gradients(parameters_.data(), batch_, sequences, length,
                                             gradients_.data());
  report.rate = optimizer_.learning_rate(number);
  report.norm = optimizer_.update(number, parameters_.data(), gradients_.data());
  return report;
}

double Trainer::held_out_bits_per_byte(int max_windows, bool rounded) {
  AlignedArray<float> copy;
  const float* parameters = parameters_.data();
  if (rounded) {
    copy = AlignedArray<float>(map_.size);
    from_checkpoint(map_, checkpoint(), copy.data());
    parameters = copy.data();
  }
  const size_t length = static_cast<size_t>(options_.long_length);
  const size_t all = (corpus_.held_out.size() - 1) / length;
  const size_t windows = std::min(all, static_cast<size_t>(max_windows));
  double nats = 0;
  for (size_t w = 0; w < windows; ++w) {
    // Spread over the text where not all of it is used.
    const size_t at = w * all / windows * length;
    nats += backprop_.loss(parameters, std::span(corpus_.held_out).subspan(at, length + 1), 1,
                           static_cast<int>(length)) *
            static_cast<double>(length);
  }
  const double bytes_per_token =
      static_cast<double>(corpus_.held_out_bytes) / static_cast<double>(corpus_.held_out.size());
  return nats / std::numbers::ln2 /
         (static_cast<double>(windows) * static_cast<double>(length) * bytes_per_token);
}

}  // namespace baton
