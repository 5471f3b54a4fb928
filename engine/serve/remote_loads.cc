// Starting, following and ending loads; quarantine of what may still be written to.
#include "engine/serve/remote_loads.h"

#include <algorithm>
#include <random>

#include "absl/strings/str_cat.h"
#include "engine/kernels/kv_cache.h"
#include "engine/shard/kv_address.h"

namespace baton::engine::serve {
namespace {

std::string make_nonce() {
  std::random_device device;
  return absl::StrCat(absl::Hex(device(), absl::kZeroPad8), absl::Hex(device(), absl::kZeroPad8),
                      absl::Hex(device(), absl::kZeroPad8), absl::Hex(device(), absl::kZeroPad8));
}

}  // namespace

RemoteLoads::RemoteLoads(RemoteLoadOptions options, kvtransfer::KvSource& connector,
                         BlockManager& blocks)
    : options_(options), nonce_(make_nonce()), connector_(connector), blocks_(blocks) {}

size_t RemoteLoads::loadable(const Sequence& sequence) {
  return (sequence.tokens.size() - 1) / kBlockTokens * kBlockTokens;
}

bool RemoteLoads::wants(const Sequence& sequence, size_t cached) const {
  if (sequence.local_only || sequence.job.has_value()) return false;
  if (options_.by_name ? !sequence.request.remote_prefill.has_value()
                       : sequence.request.prefill_address.empty()) {
    return false;
  }
  return loadable(sequence) > cached && sequence.tokens.size() - 1 - cached >= options_.min_tokens;
}

absl::Status RemoteLoads::start(Sequence* sequence, size_t tokens) {
  kvtransfer::KvLoad load;
  load.id = next_id_++;
  load.tokens.assign(sequence->tokens.begin(), sequence->tokens.begin() + tokens);
  load.first_token = static_cast<uint32_t>(sequence->computed);
  load.blocks.assign(sequence->blocks.begin() + sequence->computed / kBlockTokens,
                     sequence->blocks.begin() + tokens / kBlockTokens);
  load.timeout = options_.timeout;
  load.silence = options_.silence;
  const kvtransfer::KvRequestId id = load.id;
  sequence->source = this;
  sequence->load_end = tokens;
  absl::Status status;
  if (options_.by_name) {
    load.transfer = *sequence->request.remote_prefill;
  } else {
    status = name_ranks(sequence->request.prefill_address, load);
  }
  if (status.ok()) status = connector_.start_load(std::move(load));
  if (!status.ok()) return status;
  sequence->load = id;
  sequence->borrowed = options_.by_name;
  sequence->request.remote_prefill.reset();
  // A sequence is fetched once; if it is preempted later, its KV is computed here.
  sequence->local_only = true;
  return absl::OkStatus();
}

// Whose ranks the load comes from. Where either side has several, the parts of a request find each
// other by its key.
absl::Status RemoteLoads::name_ranks(const std::string& address, kvtransfer::KvLoad& load) const {
  absl::StatusOr<std::vector<std::string>> addresses = shard::split_kv_address(address);
  if (!addresses.ok()) return addresses.status();
  const auto theirs = static_cast<uint32_t>(addresses->size());
  const uint32_t ours = options_.ranks;
  if (theirs == 1 && ours == 1) {
    load.prefill = address;
    return absl::OkStatus();
  }
  if (theirs % ours != 0 && ours % theirs != 0) {
    return absl::InvalidArgumentError(absl::StrCat("the prefill server has ", theirs,
                                                   " tensor-parallel ranks and this one ", ours,
                                                   ": one of the numbers must divide the other"));
  }
  load.shards = *std::move(addresses);
  load.key = absl::StrCat(nonce_, "-", load.id);
  load.loads_of_key = std::max(1U, ours / theirs);
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
  sequence->borrowed = !connector_.is_exact(id);
  if (connector_.end_load(id)) return;
  // Complete, yet not quiet: the blocks stay pinned beyond the sequence's own use of them.
  blocks_.add_references(sequence->blocks);
  closing_.push_back({id, blocks_.quarantine(sequence->blocks)});
}

void RemoteLoads::give_up(Sequence* sequence) {
  sequence->borrowed = false;
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
