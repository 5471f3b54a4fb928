// Starting, following and ending loads; quarantine of what may still be written to.
#include "engine/serve/remote_loads.h"

#include <algorithm>
#include <random>

#include "absl/strings/str_cat.h"
#include "engine/kernels/kv_cache.h"
#include "engine/shard/kv_address.h"
#include "transport/address.h"

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
  const Request& request = sequence.request;
  if (sequence.local_only) return false;
  if (!request.remote_prefill.has_value() && request.prefill_address.empty()) return false;
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
  if (options_.by_name) {
    load.ask = !sequence->request.remote_prefill.has_value();
    load.push = options_.push.value_or(load.ask);
    absl::StatusOr<kvtransfer::KvTransfer> from =
        load.ask ? ask_at(sequence->request.prefill_address) : *sequence->request.remote_prefill;
    if (!from.ok()) return from.status();
    load.transfer = *std::move(from);
  }
  if (absl::Status status = connector_.start_load(std::move(load)); !status.ok()) return status;
  sequence->load = id;
  sequence->borrowed = options_.by_name;
  sequence->request.remote_prefill.reset();
  // A sequence is fetched once; if it is preempted later, its KV is computed here.
  sequence->local_only = true;
  return absl::OkStatus();
}

// A transfer that nothing has begun: prefill is asked to compute it.
absl::StatusOr<kvtransfer::KvTransfer> RemoteLoads::ask_at(const std::string& address) const {
  absl::StatusOr<std::vector<std::string>> addresses = shard::split_kv_address(address);
  if (!addresses.ok()) return addresses.status();
  const auto theirs = static_cast<uint32_t>(addresses->size());
  const uint32_t ours = options_.ranks;
  if (theirs % ours != 0 && ours % theirs != 0) {
    return absl::InvalidArgumentError(absl::StrCat("the prefill server has ", theirs,
                                                   " tensor-parallel ranks and this one ", ours,
                                                   ": one of the numbers must divide the other"));
  }
  kvtransfer::KvTransfer from{.transfer = absl::StrCat(nonce_, "-", next_id_), .ranks = theirs};
  for (std::string& each : *addresses) {
    const absl::StatusOr<Address> at = Address::decode(each);
    if (!at.ok()) return at.status();
    from.workers.push_back({at->name, std::move(each)});
  }
  return from;
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
