// A rank's card as bytes.
#include "absl/strings/ascii.h"
#include "collectives/rendezvous.h"
#include "collectives/rendezvous_wire.h"
#include "transport/wire.h"

namespace baton::collectives {
namespace {

constexpr size_t kMaxHost = 255;

void put_bytes(std::string& out, std::string_view bytes) {
  put_number(out, static_cast<uint32_t>(bytes.size()));
  out.append(bytes);
}

std::string take_bytes(WireReader& in) { return std::string(in.take(in.number<uint32_t>())); }

}  // namespace

std::string RankCard::encode() const {
  std::string out;
  put_number(out, rank);
  put_number(out, ranks);
  put_number(out, generation);
  put_number(out, version);
  put_number(out, pid);
  put_text(out, std::string_view(host).substr(0, kMaxHost));
  put_bytes(out, worker_address);
  put_bytes(out, payload);
  return out;
}

absl::StatusOr<RankCard> RankCard::decode(std::string_view bytes) {
  if (bytes.size() > kMaxCardBytes) return absl::InvalidArgumentError("a rank's card is too long");
  WireReader in(bytes);
  RankCard card;
  card.rank = in.number<uint32_t>();
  card.ranks = in.number<uint32_t>();
  card.generation = in.number<uint64_t>();
  card.version = in.number<uint32_t>();
  card.pid = in.number<uint32_t>();
  card.host = std::string(in.text(kMaxHost));
  card.worker_address = take_bytes(in);
  card.payload = take_bytes(in);
  if (!in.finished()) return absl::InvalidArgumentError("a rank's card is malformed");
  // Hosts end up in messages and terminals: keep them printable.
  for (char& c : card.host) {
    if (!absl::ascii_isgraph(static_cast<unsigned char>(c))) c = '?';
  }
  return card;
}

}  // namespace baton::collectives
