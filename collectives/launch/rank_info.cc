// A rank's information as bytes.
#include "absl/strings/ascii.h"
#include "collectives/launch/rendezvous_wire.h"
#include "collectives/rendezvous.h"
#include "transport/base/wire.h"

namespace baton::collectives {
namespace {

constexpr size_t kMaxHost = 255;

void put_bytes(std::string& out, std::string_view bytes) {
  base::put_number(out, static_cast<uint32_t>(bytes.size()));
  out.append(bytes);
}

std::string take_bytes(base::WireReader& in) { return std::string(in.take(in.number<uint32_t>())); }

}  // namespace

std::string RankInfo::encode() const {
  std::string out;
  base::put_number(out, rank);
  base::put_number(out, ranks);
  base::put_number(out, generation);
  base::put_number(out, version);
  base::put_number(out, pid);
  base::put_text(out, std::string_view(host).substr(0, kMaxHost));
  put_bytes(out, worker_address);
  put_bytes(out, payload);
  return out;
}

absl::StatusOr<RankInfo> RankInfo::decode(std::string_view bytes) {
  if (bytes.size() > launch::kMaxRankInfoBytes)
    return absl::InvalidArgumentError("a rank's information is too long");
  base::WireReader in(bytes);
  RankInfo info;
  info.rank = in.number<uint32_t>();
  info.ranks = in.number<uint32_t>();
  info.generation = in.number<uint64_t>();
  info.version = in.number<uint32_t>();
  info.pid = in.number<uint32_t>();
  info.host = std::string(in.text(kMaxHost));
  info.worker_address = take_bytes(in);
  info.payload = take_bytes(in);
  if (!in.finished()) return absl::InvalidArgumentError("a rank's information is malformed");
  // Hosts end up in messages and terminals: keep them printable.
  for (char& c : info.host) {
    if (!absl::ascii_isgraph(static_cast<unsigned char>(c))) c = '?';
  }
  return info;
}

}  // namespace baton::collectives
