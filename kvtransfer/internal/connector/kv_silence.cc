// The decode side: asks prefill workers whether they are alive, and gives up silent ones.
#include <algorithm>

#include "absl/strings/str_cat.h"
#include "kvtransfer/internal/connector/kv_loads.h"

namespace baton::kvtransfer {
namespace {

// A silence is made of so many looks at least: who did not look for a while has heard nothing
// either, and that is not the peer's fault.
constexpr int kLeastLooks = 4;
// And of so many at most, for a look is at all loads of the peer.
constexpr int kMostLooks = 16;

absl::Status silent(Time limit) {
  return absl::UnavailableError(
      absl::StrCat("no sign of life for ", seconds_of(limit),
                   " s; ask another worker, compute it here, or allow more silence"));
}

}  // namespace

void KvLoads::on_word(PeerId peer, bool alive) {
  const auto it = peers_.find(peer_key(peer));
  if (it == peers_.end()) return;
  it->second.silent = Time{};
  it->second.answers |= alive;
}

absl::Status KvLoads::check_silence(PeerId id, const std::string& name, Time silence) {
  if (silence <= Time{}) return absl::OkStatus();
  PeerRecord& peer = peers_[peer_key(id)];
  const bool new_limit = peer.silence == kNever;
  peer.silence = std::min(peer.silence, silence);
  if (new_limit || peer.probe_at == kNever) {  // no call has looked since its last load
    peer.silent = Time{};
    peer.looked = worker_.clock().now();
  }
  if (!peer.is_silent()) return absl::OkStatus();
  const absl::Status why = silent(peer.silence);
  return absl::Status(why.code(), absl::StrCat(name, ": ", why.message()));
}

bool KvLoads::note_silence(Time now) {
  bool any = false;
  for (auto& [key, peer] : peers_) {
    if (peer.probe_at == kNever || peer.silence == kNever) continue;
    if (now - peer.looked < peer.silence / kMostLooks) continue;
    note_bytes(peer);
    peer.silent += std::min(now - peer.looked, peer.silence / kLeastLooks);
    peer.looked = now;
    if (!peer.is_silent()) continue;
    for (const auto& [number, load] : peer.loads) {
      if (load->silence <= Time{} || !load->failure.ok()) continue;
      for (const Source& source : load->sources) {
        if (source.over() || peer_key(source.peer) != key) continue;
        // One that is connected and has never answered may be of a release that does not.
        if (!peer.answers && worker_.peer_state(source.peer) == PeerState::kUp) continue;
        fail(*load, source.name, silent(peer.silence));
        any |= !load->failure.ok();
      }
    }
  }
  return any;
}

// Bytes that come are a sign of life too: an answer may be behind many of them.
void KvLoads::note_bytes(const PeerRecord& peer) {
  for (const auto& [number, load] : peer.loads) {
    if (load->silence <= Time{} || load->complete()) continue;
    ++looked_at_;
    uint64_t count = load->loaded;
    for (uint32_t layer = load->loaded; layer < load->counts.size(); ++layer) {
      count += bytes_here(*load, layer);
    }
    if (std::exchange(load->count, count) == count) continue;
    for (const Source& source : load->sources) on_word(source.peer, false);
  }
}

// Sends a probe to every peer that is due one and has a load under way.
bool KvLoads::probe(Time now) {
  bool any = false;
  for (auto& [key, peer] : peers_) {
    if (now < peer.probe_at) continue;
    peer.probe_at = kNever;
    const Time interval = std::min<Time>(kProbeInterval, peer.silence / kLeastLooks);
    for (const auto& [number, load] : peer.loads) {
      for (const Source& source : load->sources) {
        if (source.over() || peer_key(source.peer) != key || peer.probe_at != kNever) continue;
        mailbox_.send(source.peer, KvMessageKind::kProbe, source.number);
        peer.probe_at = now + interval;
        any = true;
      }
      if (peer.probe_at != kNever) break;
    }
  }
  return any;
}

}  // namespace baton::kvtransfer
