// The decode side: what prefill workers say about loads, and what their silence says.
#include <algorithm>
#include <string_view>

#include "absl/strings/str_cat.h"
#include "kvtransfer/internal/connector/kv_loads.h"

namespace baton::kvtransfer {

void KvLoads::on_done(PeerId peer, uint64_t number, std::string_view body) {
  Source* source = nullptr;
  Load* load = find(peer, number, &source);
  if (load == nullptr || source->told) return;
  source->told = source->done = true;
  if (source == &load->sources.front()) load->payload = body;
  if (source->pull != nullptr) return;  // its blocks are still to be read
  // Every write ended before this was sent, so the counters are full when all have said so; where
  // one is not, a peer lied.
  const bool all = std::all_of(load->sources.begin(), load->sources.end(),
                               [](const Source& each) { return each.done; });
  if (all) {
    refresh(*load);
    if (load->complete()) return;
    for (Source& each : load->sources) each.done = false;
    fail(*load, source->name,
         absl::DataLossError("prefill reports that all KV is sent, but some has not arrived"));
  }
}

void KvLoads::on_failed(PeerId peer, uint64_t number, std::string_view body) {
  Source* source = nullptr;
  Load* load = find(peer, number, &source);
  // A lease may run out when all was said to be ready.
  if (load == nullptr || source->over() || (source->told && source->pull == nullptr)) return;
  source->told = true;
  const absl::Status why = decode_kv_failure(body, &source->arrived);
  fail(*load, source->name, why);
}

void KvLoads::on_cancelled(PeerId peer, uint64_t number) {
  Source* source = nullptr;
  Load* load = find(peer, number, &source);
  if (load == nullptr || source->told) return;
  source->told = true;
  fail(*load, source->name, absl::CancelledError("cancelled"));
}

void KvLoads::on_offer(PeerId peer, uint64_t number, std::string_view body) {
  Source* source = nullptr;
  Load* load = find(peer, number, &source);
  if (load == nullptr || source->pull == nullptr) return;
  if (absl::Status status = pulls_.on_offer(*source->pull, body); !status.ok()) {
    fail(*load, source->name, status);
  }
  schedule(*load);
}

void KvLoads::on_ready(PeerId peer, uint64_t number, std::string_view body) {
  Source* source = nullptr;
  Load* load = find(peer, number, &source);
  if (load == nullptr || source->pull == nullptr) return;
  if (absl::Status status = pulls_.on_ready(*source->pull, body); !status.ok()) {
    fail(*load, source->name, status);
  }
}

void KvLoads::on_lease_renewed(PeerId peer, uint64_t number, std::string_view body) {
  Source* source = nullptr;
  Load* load = find(peer, number, &source);
  if (load == nullptr || source->pull == nullptr) return;
  if (absl::Status status = pulls_.on_lease_renewed(*source->pull, body); !status.ok()) {
    fail(*load, source->name, status);
  }
  schedule(*load);
}

void KvLoads::on_bad_answer(PeerId peer, uint64_t number, const absl::Status& why) {
  Source* source = nullptr;
  Load* load = find(peer, number, &source);
  if (load != nullptr && !source->told) fail(*load, source->name, why);
}

absl::Status KvLoads::lost(const absl::Status& why) {
  return absl::UnavailableError(absl::StrCat("the connection is lost: ", why.message(),
                                             "; ask another worker or compute it here"));
}

void KvLoads::on_peer_down(PeerId peer, const absl::Status& why) {
  calls_.on_peer_down(peer);
  pulls_.on_peer_down(peer);
  const auto record = peers_.extract(peer_key(peer));
  if (record.empty()) return;
  for (const auto& [number, load] : record.mapped().loads) {
    for (Source& source : load->sources) {
      if (source.peer != peer || source.number != number || source.over()) continue;
      if (source.pull != nullptr) source.pull->told = true;  // no peer is there to be told
      source.told = true;  // a closed connection is fenced: nothing more comes through it
      fail(*load, source.name, lost(why));
    }
  }
}

}  // namespace baton::kvtransfer
