// Starting, following and ending loads; quarantine of what may still be written to.
#include "engine/serve/remote_loads.h"

#include <algorithm>

#include "engine/kernels/kv_cache.h"

namespace baton::engine::serve {

size_t RemoteLoads::loadable(const Sequence& sequence) {
  return (sequence.tokens.size() - 1) / kBlockTokens * kBlockTokens;
}

bool RemoteLoads::wants(const Sequence& sequence, size_t cached) const {
  if (sequence.local_only || sequence.job.has_value()) return false;
  if (sequence.request.prefill_address.empty()) return false;
  return loadable(sequence) > cached && sequence.tokens.size() - 1 - cached >= options_.min_tokens;
}

absl::Status RemoteLoads::start(Sequence* sequence, size_t tokens) {
  kvtransfer::KvLoad load;
  load.id = next_id_++;
  load.prefill = sequence->request.prefill_address;
  load.tokens.assign(sequence->tokens.begin(), sequence->tokens.begin() + tokens);
  load.first_token = static_cast<uint32_t>(sequence->computed);
  load.blocks.assign(sequence->blocks.begin() + sequence->computed / kBlockTokens,
                     sequence->blocks.begin() + tokens / kBlockTokens);
  load.timeout = options_.timeout;
  const kvtransfer::KvRequestId id = load.id;
  sequence->source = this;
  sequence->load_end = tokens;
  if (absl::Status status = connector_.start_load(std::move(load)); !status.ok()) return status;
  sequence->load = id;
  // A sequence is fetched once; if it is preempted later, its KV is computed here.
  sequence->local_only = true;
  return absl::OkStatus();
}

uint32_t RemoteLoads::layers(const Sequence& sequence) const {
  return connector_.layers_loaded(sequence.load);
}

absl::StatusOr<bool> RemoteLoads::is_complete(const Sequence& sequence) const {
  if (connector_.layers_loaded(sequence.load) >= options_.layers) return true;
  if (absl::Status status = connector_.load_status(sequence.load); !status.ok()) return status;
  return false;
}

void RemoteLoads::finish(Sequence* sequence) {
  const kvtransfer::KvRequestId id = std::exchange(sequence->load, 0);
  if (connector_.end_load(id)) return;
  // Complete, yet not quiet: the blocks stay pinned beyond the sequence's own use of them.
  blocks_.add_references(sequence->blocks);
  closing_.push_back({id, blocks_.quarantine(sequence->blocks)});
}

void RemoteLoads::give_up(Sequence* sequence) {
  const kvtransfer::KvRequestId id = std::exchange(sequence->load, 0);
  if (connector_.end_load(id)) {
    blocks_.release(sequence->blocks);
    sequence->blocks.clear();
  } else {
    closing_.push_back({id, blocks_.quarantine(std::exchange(sequence->blocks, {}))});
  }
}

void RemoteLoads::poll() {
  std::erase_if(closing_, [this](const Closing& closing) {
    if (!connector_.end_load(closing.id)) return false;
    blocks_.end_quarantine(closing.quarantine);
    return true;
  });
}

}  // namespace baton::engine::serve
