// Encoding and decoding what ranks and their rendezvous say to each other.
#include "collectives/launch/rendezvous_wire.h"

#include <unistd.h>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "transport/base/wire.h"

namespace baton::launch {

using collectives::RankInfo;

namespace {

constexpr size_t kMaxMessage = 8 << 10;
constexpr std::string_view kKind = "rendezvous";
constexpr std::string_view kPurpose = "rendezvous 2";  // 1 spoke in clear
// Ranks may wait for minutes: a dead one is found out within one.
constexpr Time kSilence = std::chrono::minutes(1);
// Longer waits count as unlimited. This keeps sums of times far from overflow.
constexpr uint64_t kLongestMs = uint64_t{366} * 24 * 3600 * 1000;

}  // namespace

std::string encode_message(MessageType type, std::string_view body) {
  std::string out;
  base::put_number(out, static_cast<uint8_t>(type));
  out.append(body);
  return out;
}

absl::StatusOr<Message> decode_message(std::string_view bytes) {
  base::WireReader in(bytes);
  const uint8_t type = in.number<uint8_t>();
  if (in.failed() || bytes.size() - 1 > kMaxBody ||
      type < static_cast<uint8_t>(MessageType::kJoin) ||
      type > static_cast<uint8_t>(MessageType::kRefusal)) {
    return absl::InvalidArgumentError(
        absl::StrCat("a message of type ", type, " with ", bytes.size(),
                     " bytes is not part of the rendezvous protocol"));
  }
  return Message{static_cast<MessageType>(type), bytes.substr(1)};
}

std::string encode_join(const Join& join) {
  std::string out;
  base::put_number(
      out, join.patience == kNever
               ? UINT64_MAX
               : static_cast<uint64_t>(std::max<int64_t>(
                     0, std::chrono::ceil<std::chrono::milliseconds>(join.patience).count())));
  return out + join.info.encode();
}

absl::StatusOr<Join> decode_join(std::string_view body) {
  base::WireReader in(body);
  const uint64_t ms = in.number<uint64_t>();
  if (in.failed()) return absl::InvalidArgumentError("a rank's first message is too short");
  auto info = RankInfo::decode(body.substr(sizeof(ms)));
  if (!info.ok()) return info.status();
  Join join;
  if (ms <= kLongestMs) join.patience = std::chrono::milliseconds(static_cast<int64_t>(ms));
  join.info = *std::move(info);
  return join;
}

std::string encode_refusal(const absl::Status& why) {
  std::string out;
  base::put_number(out, static_cast<uint8_t>(why.code()));
  out += std::string(why.message()).substr(0, kMaxMessage);
  return out;
}

absl::Status decode_refusal(std::string_view body) {
  base::WireReader in(body);
  const uint8_t code = in.number<uint8_t>();
  if (in.failed() || code == 0 || code > static_cast<uint8_t>(absl::StatusCode::kUnauthenticated) ||
      body.size() > kMaxMessage + 1) {
    return absl::InvalidArgumentError("the rendezvous refused this rank without a reason");
  }
  std::string message(body.substr(1));
  for (char& c : message) {
    if (!absl::ascii_isprint(static_cast<unsigned char>(c))) c = '?';
  }
  return absl::Status(static_cast<absl::StatusCode>(code), message);
}

const net::SocketOptions& rendezvous_sockets() {
  static const net::SocketOptions kOptions{
      .congestion = "system",
      .buffer_bytes = 0,
      .user_timeout_ms = static_cast<int>(kSilence / std::chrono::milliseconds(1))};
  return kOptions;
}

const net::MessageStream::Options& rendezvous_stream() {
  static const net::MessageStream::Options kOptions{.max_message = kMaxBody + 1,
                                                    .silence = kSilence};
  return kOptions;
}

HelloInfo rendezvous_hello() {
  HelloInfo hello;
  hello.name = std::string(kKind);
  hello.pid = static_cast<uint32_t>(getpid());
  hello.extra = std::string(kPurpose);
  return hello;
}

bool is_rendezvous(const HelloInfo& peer) { return peer.extra == kPurpose; }

absl::Status no_rendezvous(const HelloInfo& peer, const std::string& where) {
  if (std::string_view(peer.extra).substr(0, kKind.size()) == kKind) {
    return absl::FailedPreconditionError(
        absl::StrCat("the rendezvous at ", where,
                     " is of another version of Baton: install the same everywhere"));
  }
  return absl::InvalidArgumentError(
      absl::StrCat(where,
                   " is a Baton worker, not a rendezvous: pass the address at which rank 0 or the "
                   "launcher serves it"));
}

}  // namespace baton::launch

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
