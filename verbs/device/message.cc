// Encodes the messages between two verbs workers, and decodes them strictly.
#include "verbs/device/message.h"

#include <cstring>

#include "absl/strings/str_format.h"
#include "transport/base/wire.h"
#include "transport/internal/tables/arrivals.h"

namespace baton::verbs {
namespace {

constexpr uint8_t kOffersVersion = 3;
constexpr size_t kMaxText = 512;

absl::Status malformed() {
  return absl::InvalidArgumentError(
      "the peer sent a malformed message: install the same Baton on both sides");
}

void put_gid(std::string& out, const ibv_gid& gid) {
  out.append(reinterpret_cast<const char*>(gid.raw), sizeof gid.raw);
}

ibv_gid take_gid(base::WireReader& in) {
  ibv_gid gid{};
  const std::string_view raw = in.take(sizeof gid.raw);
  if (!raw.empty()) std::memcpy(gid.raw, raw.data(), raw.size());
  return gid;
}

bool take_flag(base::WireReader& in, bool& good) {
  const uint8_t value = in.number<uint8_t>();
  good = good && value <= 1;
  return value == 1;
}

RegionName take_name(base::WireReader& in) {
  RegionName name;
  name.index = in.number<uint32_t>();
  name.generation = in.number<uint32_t>();
  name.key = in.number<uint64_t>();
  return name;
}

}  // namespace

absl::StatusOr<Message> decode_message(std::string_view bytes) {
  base::WireReader in(bytes);
  const uint8_t kind = in.number<uint8_t>();
  const uint8_t zero = in.number<uint8_t>();
  Message message{static_cast<Kind>(kind), in.number<uint16_t>(), {}};
  if (in.failed() || zero != 0 || kind < static_cast<uint8_t>(Kind::kReady) ||
      kind > static_cast<uint8_t>(Kind::kGoodbye) || bytes.size() > kMessageBytes) {
    return malformed();
  }
  message.body = bytes.substr(kHeaderBytes);
  return message;
}

void begin_message(std::string& out, Kind kind, uint16_t credits) {
  out.clear();
  base::put_number(out, static_cast<uint8_t>(kind));
  base::put_number(out, uint8_t{0});
  base::put_number(out, credits);
}

void set_credits(std::string& message, uint16_t credits) {
  std::memcpy(message.data() + 2, &credits, sizeof credits);
}

void encode(std::string& out, const Arrival& arrival) {
  base::put_number(out, arrival.transfer.slot);
  base::put_number(out, arrival.transfer.generation);
  base::put_number(out, arrival.slice);
  base::put_number(out, arrival.slice_bytes);
  base::put_number(out, arrival.total_bytes);
  base::put_number(out, arrival.counter_index);
  base::put_number(out, arrival.counter_generation);
  base::put_number(out, arrival.increment);
  base::put_text(out, arrival.notify);
}

absl::StatusOr<Arrival> decode_arrival(std::string_view body) {
  base::WireReader in(body);
  Arrival arrival;
  arrival.transfer.slot = in.number<uint32_t>();
  arrival.transfer.generation = in.number<uint32_t>();
  arrival.slice = in.number<uint32_t>();
  arrival.slice_bytes = in.number<uint64_t>();
  arrival.total_bytes = in.number<uint64_t>();
  arrival.counter_index = in.number<uint32_t>();
  arrival.counter_generation = in.number<uint16_t>();
  arrival.increment = in.number<uint64_t>();
  arrival.notify = in.text(kMaxArrivalNotify);
  if (!in.finished() || arrival.slice >= internal::Arrivals::kMaxSlices ||
      arrival.transfer.slot >= internal::Arrivals::kMaxSlots ||
      arrival.slice_bytes > arrival.total_bytes ||
      (arrival.counter_index >= CounterTable::kCapacity &&
       !CounterTable::reserved(arrival.counter_index))) {
    return malformed();
  }
  return arrival;
}

void encode(std::string& out, const RegionName& name) {
  base::put_number(out, name.index);
  base::put_number(out, name.generation);
  base::put_number(out, name.key);
}

absl::StatusOr<RegionName> decode_name(std::string_view body) {
  base::WireReader in(body);
  const RegionName name = take_name(in);
  if (!in.finished()) return malformed();
  return name;
}

void encode(std::string& out, const RegionAnswer& answer) {
  encode(out, answer.name);
  base::put_number(out, static_cast<uint8_t>(answer.refusal.code()));
  base::put_text(out, std::string_view(answer.refusal.message().data(),
                                       std::min(answer.refusal.message().size(), kMaxText)));
  base::put_number(out, answer.base);
  base::put_number(out, answer.size);
  base::put_number(out, static_cast<uint8_t>(answer.access));
  base::put_number(out, static_cast<uint8_t>(answer.rkeys.size()));
  for (uint32_t rkey : answer.rkeys) base::put_number(out, rkey);
}

absl::StatusOr<RegionAnswer> decode_answer(std::string_view body) {
  base::WireReader in(body);
  RegionAnswer answer;
  answer.name = take_name(in);
  const uint8_t code = in.number<uint8_t>();
  const std::string_view text = in.text(kMaxText);
  if (code > static_cast<uint8_t>(absl::StatusCode::kUnauthenticated)) return malformed();
  answer.refusal = absl::Status(static_cast<absl::StatusCode>(code), std::string(text));
  answer.base = in.number<uint64_t>();
  answer.size = in.number<uint64_t>();
  const uint8_t access = in.number<uint8_t>();
  const uint8_t count = in.number<uint8_t>();
  if (in.failed() || access > 3 || count > kMaxPorts) return malformed();
  answer.access = static_cast<Access>(access);
  for (uint8_t i = 0; i < count; ++i) answer.rkeys.push_back(in.number<uint32_t>());
  if (!in.finished() || answer.base + answer.size < answer.base) return malformed();
  return answer;
}

void encode(std::string& out, const Endpoint& endpoint) {
  base::put_number(out, endpoint.rail);
  base::put_number(out, endpoint.rails);
  base::put_number(out, endpoint.incarnation);
  base::put_number(out, endpoint.port);
  base::put_number(out, endpoint.origin);
  base::put_number(out, static_cast<uint8_t>(endpoint.recovery));
  base::put_number(out, endpoint.mtu);
  base::put_number(out, endpoint.family);
  base::put_number(out, endpoint.rd_atomic);
  base::put_number(out, endpoint.lid);
  base::put_number(out, endpoint.receives);
  base::put_number(out, endpoint.queue_pair);
  base::put_number(out, endpoint.sequence);
  base::put_number(out, static_cast<uint8_t>(endpoint.by_cm));
  base::put_number(out, endpoint.cm_port);
  put_gid(out, endpoint.gid);
  base::put_number(out, endpoint.traffic_class);
  base::put_number(out, endpoint.service_level);
}

absl::StatusOr<Endpoint> decode_endpoint(std::string_view body) {
  base::WireReader in(body);
  Endpoint endpoint;
  bool good = true;
  endpoint.rail = in.number<uint16_t>();
  endpoint.rails = in.number<uint16_t>();
  endpoint.incarnation = in.number<uint32_t>();
  endpoint.port = in.number<uint8_t>();
  endpoint.origin = in.number<uint8_t>();
  endpoint.recovery = take_flag(in, good);
  endpoint.mtu = in.number<uint8_t>();
  endpoint.family = in.number<uint8_t>();
  endpoint.rd_atomic = in.number<uint8_t>();
  endpoint.lid = in.number<uint16_t>();
  endpoint.receives = in.number<uint16_t>();
  endpoint.queue_pair = in.number<uint32_t>();
  endpoint.sequence = in.number<uint32_t>();
  endpoint.by_cm = take_flag(in, good);
  endpoint.cm_port = in.number<uint16_t>();
  endpoint.gid = take_gid(in);
  endpoint.traffic_class = in.number<uint8_t>();
  endpoint.service_level = in.number<uint8_t>();
  if (!in.finished() || !good || endpoint.rail >= endpoint.rails || endpoint.incarnation == 0 ||
      endpoint.mtu < IBV_MTU_256 || endpoint.mtu > IBV_MTU_4096 || endpoint.rd_atomic == 0 ||
      endpoint.receives < 8 || endpoint.service_level > 15 || endpoint.queue_pair >> 24 != 0 ||
      endpoint.sequence >> 24 != 0) {
    return malformed();
  }
  return endpoint;
}

void encode(std::string& out, const RailNote& note) {
  base::put_number(out, note.rail);
  base::put_number(out, note.incarnation);
  base::put_number(out, note.received);
  base::put_number(out, static_cast<uint8_t>(note.lost));
  base::put_text(out, note.text.substr(0, kMaxText));
}

absl::StatusOr<RailNote> decode_note(std::string_view body) {
  base::WireReader in(body);
  RailNote note;
  bool good = true;
  note.rail = in.number<uint16_t>();
  note.incarnation = in.number<uint32_t>();
  note.received = in.number<uint64_t>();
  note.lost = take_flag(in, good);
  note.text = in.text(kMaxText);
  if (!in.finished() || !good) return malformed();
  return note;
}

std::string encode_offers(const std::vector<PortOffer>& offers) {
  std::string out;
  base::put_number(out, kOffersVersion);
  base::put_number(out, static_cast<uint8_t>(offers.size()));
  for (const PortOffer& offer : offers) {
    base::put_number(out, offer.families);
    base::put_number(out, static_cast<uint8_t>(offer.gids.size()));
    for (const ibv_gid& gid : offer.gids) put_gid(out, gid);
  }
  return out;
}

absl::StatusOr<std::vector<PortOffer>> decode_offers(std::string_view extra) {
  base::WireReader in(extra);
  const uint8_t version = in.number<uint8_t>();
  const uint8_t count = in.number<uint8_t>();
  if (!in.failed() && version != kOffersVersion) {
    return absl::FailedPreconditionError(absl::StrFormat(
        "the peer speaks version %u of the verbs provider's messages and this side %u: install the "
        "same Baton on both sides",
        version, kOffersVersion));
  }
  if (in.failed() || count == 0 || count > kMaxPorts) return malformed();
  std::vector<PortOffer> offers(count);
  for (PortOffer& offer : offers) {
    offer.families = in.number<uint8_t>();
    const uint8_t gids = in.number<uint8_t>();
    if (in.failed() || gids > most_gids(count)) return malformed();
    for (uint8_t i = 0; i < gids; ++i) offer.gids.push_back(take_gid(in));
  }
  if (!in.finished()) return malformed();
  return offers;
}

}  // namespace baton::verbs
