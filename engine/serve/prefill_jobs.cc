// Accepting jobs of decode workers and keeping their blocks until they are sent.
#include "engine/serve/prefill_jobs.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "engine/kernels/kv_cache.h"

namespace baton::engine::serve {

BlockRange completed_blocks(size_t begin, size_t end, size_t total) {
  const size_t first = begin / kBlockTokens;
  const size_t last = end == total ? (end + kBlockTokens - 1) / kBlockTokens : end / kBlockTokens;
  return {first, last - first};
}

absl::Status PrefillJobs::check(const kvtransfer::KvJob& job) const {
  if (job.tokens.empty()) return absl::InvalidArgumentError("the prompt has no tokens");
  if (job.tokens.size() > limits_.max_tokens) {
    return absl::ResourceExhaustedError(
        absl::StrCat("the prompt has ", job.tokens.size(), " tokens; this prefill worker takes ",
                     limits_.max_tokens, " (its context and its cache; see --blocks)"));
  }
  if (job.first_token % kBlockTokens != 0 || job.first_token >= job.tokens.size()) {
    return absl::InvalidArgumentError(absl::StrCat("the first token wanted is ", job.first_token,
                                                   " of ", job.tokens.size(),
                                                   "; it must start a block of the prompt"));
  }
  for (int32_t token : job.tokens) {
    if (token < 0 || token >= limits_.vocab_size) {
      return absl::InvalidArgumentError(
          absl::StrCat("token ", token, " is not in the vocabulary of ", limits_.vocab_size,
                       "; prefill and decode must serve the same model"));
    }
  }
  return absl::OkStatus();
}

std::unique_ptr<Sequence> PrefillJobs::accept() {
  while (std::optional<kvtransfer::KvJob> job = connector_.next_job()) {
    if (absl::Status status = check(*job); !status.ok()) {
      connector_.finish_job(job->job, status);
      saving_.push_back({job->job, {}});
      continue;
    }
    if (!job->key.empty()) connector_.renew_job(job->job, limits_.loads_apart).IgnoreError();
    auto sequence = std::make_unique<Sequence>();
    sequence->tokens = std::move(job->tokens);
    sequence->prompt_tokens = sequence->tokens.size();
    sequence->job = PrefillJob{
        .job = job->job, .request = job->request, .first_block = job->first_token / kBlockTokens};
    return sequence;
  }
  return nullptr;
}

absl::Status PrefillJobs::send_cached(const Sequence& sequence) {
  const size_t first = sequence.job->first_block;
  const size_t last = sequence.computed / kBlockTokens;
  if (first >= last) return absl::OkStatus();
  const absl::Span<const uint32_t> blocks(sequence.blocks.data() + first, last - first);
  for (uint32_t layer = 0; layer < limits_.layers; ++layer) {
    absl::Status status =
        connector_.save_layer(sequence.job->job, layer, static_cast<uint32_t>(first), blocks);
    if (!status.ok()) return status;
  }
  return absl::OkStatus();
}

void PrefillJobs::finish(Sequence* sequence, const absl::Status& outcome) {
  connector_.finish_job(sequence->job->job, outcome);
  saving_.push_back({sequence->job->job, std::exchange(sequence->blocks, {})});
}

void PrefillJobs::poll() {
  std::erase_if(saving_, [this](const Saving& saving) {
    if (!connector_.is_saved(saving.job)) return false;
    blocks_.release(saving.blocks);
    return true;
  });
}

uint64_t PrefillJobs::references() const {
  uint64_t sum = 0;
  for (const Saving& saving : saving_) sum += saving.blocks.size();
  return sum;
}

}  // namespace baton::engine::serve
