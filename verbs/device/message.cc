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

// The fields of each message, in their order on the wire.
constexpr auto kArrivalMembers = [](auto& wire, auto& m) {
  wire(m.transfer, m.slice, m.slice_bytes, m.total_bytes, m.counter_index, m.counter_generation,
       m.increment);
  wire.text(m.notify, kMaxArrivalNotify);
};
constexpr auto kNameMembers = [](auto& wire, auto& m) { wire(m.index, m.generation, m.key); };
constexpr auto kEndpointMembers = [](auto& wire, auto& m) {
  wire(m.rail, m.rails, m.incarnation, m.port, m.origin, m.recovery, m.mtu, m.family, m.rd_atomic,
       m.lid, m.receives, m.queue_pair, m.sequence, m.by_cm, m.cm_port, m.gid.raw, m.traffic_class,
       m.service_level);
};
constexpr auto kNoteMembers = [](auto& wire, auto& m) {
  wire(m.rail, m.incarnation, m.received, m.lost);
  wire.text(m.text, kMaxText);
};

template <typename T, typename Members>
void encode_body(std::string& out, const T& message, const Members& members) {
  base::WireWriter wire(out);
  members(wire, message);
}
// is_wrong(message): no correct peer sends it.
template <typename T, typename Members, typename IsWrong>
absl::StatusOr<T> decode_body(std::string_view body, const Members& members,
                              const IsWrong& is_wrong) {
  base::WireReader in(body);
  T message;
  members(in, message);
  if (!in.finished() || is_wrong(message)) return malformed();
  return message;
}
constexpr auto kAlwaysGood = [](const auto&) { return false; };

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
  base::WireWriter wire(out);
  wire(kind, uint8_t{0}, credits);
}

void set_credits(std::string& message, uint16_t credits) {
  std::memcpy(message.data() + 2, &credits, sizeof credits);
}

void encode(std::string& out, const Arrival& arrival) {
  encode_body(out, arrival, kArrivalMembers);
}

absl::StatusOr<Arrival> decode_arrival(std::string_view body) {
  return decode_body<Arrival>(body, kArrivalMembers, [](const Arrival& arrival) {
    return arrival.slice >= internal::Arrivals::kMaxSlices ||
           arrival.transfer.slot >= internal::Arrivals::kMaxSlots ||
           arrival.slice_bytes > arrival.total_bytes ||
           (arrival.counter_index >= CounterTable::kCapacity &&
            !CounterTable::reserved(arrival.counter_index));
  });
}

void encode(std::string& out, const RegionName& name) { encode_body(out, name, kNameMembers); }

absl::StatusOr<RegionName> decode_name(std::string_view body) {
  return decode_body<RegionName>(body, kNameMembers, kAlwaysGood);
}

void encode(std::string& out, const RegionAnswer& answer) {
  base::WireWriter wire(out);
  kNameMembers(wire, answer.name);
  wire(static_cast<uint8_t>(answer.refusal.code()));
  wire.text({answer.refusal.message().data(), answer.refusal.message().size()}, kMaxText);
  wire(answer.base, answer.size, answer.access, static_cast<uint8_t>(answer.rkeys.size()));
  for (const uint32_t rkey : answer.rkeys) wire(rkey);
}

absl::StatusOr<RegionAnswer> decode_answer(std::string_view body) {
  base::WireReader in(body);
  RegionAnswer answer;
  kNameMembers(in, answer.name);
  const uint8_t code = in.number<uint8_t>();
  const std::string_view text = in.text(kMaxText);
  if (code > static_cast<uint8_t>(absl::StatusCode::kUnauthenticated)) return malformed();
  answer.refusal = absl::Status(static_cast<absl::StatusCode>(code), std::string(text));
  in(answer.base, answer.size, answer.access);
  const uint8_t count = in.number<uint8_t>();
  if (in.failed() || static_cast<uint8_t>(answer.access) > 3 || count > kMaxPorts) {
    return malformed();
  }
  for (uint8_t i = 0; i < count; ++i) answer.rkeys.push_back(in.number<uint32_t>());
  if (!in.finished() || answer.base + answer.size < answer.base) return malformed();
  return answer;
}

void encode(std::string& out, const Endpoint& endpoint) {
  encode_body(out, endpoint, kEndpointMembers);
}

absl::StatusOr<Endpoint> decode_endpoint(std::string_view body) {
  return decode_body<Endpoint>(body, kEndpointMembers, [](const Endpoint& endpoint) {
    return endpoint.rail >= endpoint.rails || endpoint.incarnation == 0 ||
           endpoint.mtu < IBV_MTU_256 || endpoint.mtu > IBV_MTU_4096 || endpoint.rd_atomic == 0 ||
           endpoint.receives < 8 || endpoint.service_level > 15 || endpoint.queue_pair >> 24 != 0 ||
           endpoint.sequence >> 24 != 0;
  });
}

void encode(std::string& out, const RailNote& note) { encode_body(out, note, kNoteMembers); }

absl::StatusOr<RailNote> decode_note(std::string_view body) {
  return decode_body<RailNote>(body, kNoteMembers, kAlwaysGood);
}

std::string encode_offers(const std::vector<PortOffer>& offers) {
  std::string out;
  base::WireWriter wire(out);
  wire(kOffersVersion, static_cast<uint8_t>(offers.size()));
  for (const PortOffer& offer : offers) {
    wire(offer.families, static_cast<uint8_t>(offer.gids.size()));
    for (const ibv_gid& gid : offer.gids) wire(gid.raw);
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
    offer.gids.resize(gids);
    for (ibv_gid& gid : offer.gids) in(gid.raw);
  }
  if (!in.finished()) return malformed();
  return offers;
}

}  // namespace baton::verbs
