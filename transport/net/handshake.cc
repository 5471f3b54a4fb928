// The handshake: what each side sends and checks, one step at a time.
#include "transport/net/handshake.h"

#include <openssl/crypto.h>

#include <algorithm>
#include <array>
#include <bit>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "transport/base/nearest_name.h"
#include "transport/base/wire.h"
#include "transport/base/worker_keys.h"
#include "transport/net/ciphers/crypto.h"

namespace baton::net {
namespace {

constexpr size_t kProofBytes = 32;
constexpr size_t kMaxInfoBytes = 2048;
constexpr uint32_t kAccepted = 1;
constexpr uint32_t kRefused = 2;

absl::Status wrong_key() {
  return absl::PermissionDeniedError(
      "authentication failed: the two workers hold different cluster keys; give both the same file "
      "(BATON_KEY_FILE, or the program's option for a key file)");
}

template <typename Bytes>
void fill(Bytes& out) {
  base::fill_with_secret(out.data(), out.size());
}

std::array<uint8_t, Opening::kIdBytes> key_id(const ClusterKey& key, size_t which,
                                              const Key32& nonce) {
  const auto mac = key.hmac(absl::StrCat("baton key id", std::string(view(nonce))), which);
  std::array<uint8_t, Opening::kIdBytes> out{};
  std::copy_n(mac.begin(), out.size(), out.begin());
  return out;
}

std::string range(uint32_t lowest, uint32_t highest) {
  return lowest == highest ? absl::StrCat("version ", highest)
                           : absl::StrCat("versions ", lowest, " to ", highest);
}

bool same(std::string_view a, std::string_view b) {
  return a.size() == b.size() && CRYPTO_memcmp(a.data(), b.data(), a.size()) == 0;
}

Protection strongest(Protections of) {
  return static_cast<Protection>(std::bit_width(static_cast<unsigned>(of)) - 1);
}

}  // namespace

Handshake::Handshake(Role role, const ClusterKey& key, HelloInfo self, const Options& options)
    : role_(role), key_(key), self_(std::move(self)), options_(options), purpose_(options.purpose) {
  opening_.highest = options_.versions.highest;
  opening_.lowest = options_.versions.lowest;
  opening_.offers = options_.offers;
  opening_.needs = options_.needs;
  fill(opening_.nonce);
  if (role_ == Role::kClient) open();
  expect(State::kPrefix, Opening::kPrefixBytes);
}

void Handshake::expect(State state, size_t bytes) {
  state_ = state;
  wanted_ = bytes;
}

absl::Status Handshake::receive(std::string_view bytes) {
  if (bytes.size() != wanted_ || state_ == State::kDone || state_ == State::kFailed) {
    return absl::InternalError("the handshake received bytes that it did not ask for");
  }
  absl::Status status;
  switch (state_) {
    case State::kPrefix:
      status = on_prefix(bytes);
      break;
    case State::kOpening:
      status = on_opening(bytes);
      break;
    case State::kProof:
      status = on_proof(bytes);
      break;
    case State::kVerdict:
      status = on_verdict(bytes);
      break;
    case State::kPadding:
      role_ == Role::kServer ? accept() : send_info();
      break;
    case State::kLength:
      status = on_length(bytes);
      break;
    case State::kInfo:
      status = on_info(bytes);
      break;
    case State::kDone:
    case State::kFailed:
      break;
  }
  if (!status.ok()) expect(State::kFailed, 0);
  return status;
}

// Makes our part of the keys; a client says it at once.
void Handshake::open() {
  if (!options_.one_process) {
    const KeyPair share = KeyPair::make();
    share_ = share.private_key;
    opening_.share = share.public_key;
    if (const auto own = base::worker_secret(self_.uid.bytes); own.has_value()) {
      static_key_ = own->private_key;
      opening_.static_key = own->public_key;
    }
  }
  if (role_ == Role::kServer) return;
  opening_.purpose = static_cast<uint16_t>(purpose_);
  for (size_t i = 0; i < opening_.ids.size(); ++i) {
    // Bytes at random in place of a key that there is not: how many there are is no reader's
    // business.
    fill(opening_.ids[i]);
    if (i < key_.count()) opening_.ids[i] = key_id(key_, i, opening_.nonce);
  }
  client_opening_ = opening_.encode(true);
  out_ = client_opening_;
}

absl::Status Handshake::on_prefix(std::string_view bytes) {
  base::WireReader in(bytes);
  if (in.take(kMagic.size()) != kMagic) {
    return absl::InvalidArgumentError(
        "the other side does not speak Baton's protocol: check the address and the port");
  }
  const uint32_t highest = in.number<uint32_t>();
  in.take(sizeof(Opening::purpose));
  const uint16_t said_lowest = in.number<uint16_t>();
  const uint32_t lowest = highest <= 3 ? highest : said_lowest;  // versions to 3 named one
  const Versions ours = options_.versions;
  if (highest < ours.lowest || lowest > ours.highest || lowest > highest) {
    // The other side is to be able to say what is wrong, too.
    if (role_ == Role::kServer) out_ += opening_.encode(false);
    return absl::FailedPreconditionError(absl::StrFormat(
        "the peer speaks protocol %s, this side %s: install releases of Baton that share a version",
        range(lowest, highest), range(ours.lowest, ours.highest)));
  }
  (role_ == Role::kServer ? client_opening_ : server_opening_) = std::string(bytes);
  expect(State::kOpening, Opening::kBytes - Opening::kPrefixBytes);
  return absl::OkStatus();
}

absl::Status Handshake::on_opening(std::string_view bytes) {
  if (role_ == Role::kServer) return answer(Opening::decode(client_opening_.append(bytes), true));
  return check_answer(Opening::decode(server_opening_.append(bytes), false));
}

absl::Status Handshake::answer(const Opening& theirs) {
  if (theirs.purpose != static_cast<uint16_t>(Purpose::kRail) &&
      theirs.purpose != static_cast<uint16_t>(Purpose::kQuery)) {
    return absl::InvalidArgumentError("the peer's hello has an unknown purpose");
  }
  purpose_ = static_cast<Purpose>(theirs.purpose);
  size_t ours = 0;
  for (; ours < key_.count() && opening_.which == Opening::kNoKey; ++ours) {
    const auto id = key_id(key_, ours, theirs.nonce);
    const auto found = std::find(theirs.ids.begin(), theirs.ids.end(), id);
    if (found != theirs.ids.end()) {
      opening_.which = static_cast<uint8_t>(found - theirs.ids.begin());
    }
  }
  const bool known = opening_.which != Opening::kNoKey;
  if (known) open();  // costs more than a stranger is worth
  opening_.version = std::min<uint32_t>(theirs.highest, options_.versions.highest);
  server_opening_ = opening_.encode(false);
  out_ += server_opening_;
  if (!known) return wrong_key();
  if (absl::Status status = protect(theirs); !status.ok()) return status;
  if (absl::Status status = derive_root(theirs, ours - 1); !status.ok()) return status;
  expect(State::kProof, kProofBytes + (padded() ? sizeof(uint16_t) : 0));
  return absl::OkStatus();
}

absl::Status Handshake::check_answer(const Opening& theirs) {
  if (theirs.which == Opening::kNoKey) return wrong_key();
  if (theirs.which >= key_.count() ||
      theirs.version != std::min<uint32_t>(theirs.highest, options_.versions.highest)) {
    return absl::InvalidArgumentError("the peer's hello answers a different hello");
  }
  opening_.version = theirs.version;
  if (absl::Status status = protect(theirs); !status.ok()) return status;
  if (absl::Status status = derive_root(theirs, theirs.which); !status.ok()) return status;
  out_.append(view(derive(role_, "proof")));
  if (padded()) {
    base::put_number(out_, static_cast<uint16_t>(padding_));
    out_.append(padding_, '\0');
  }
  expect(State::kVerdict, sizeof(kAccepted) + kProofBytes);
  return absl::OkStatus();
}

// Each side must offer what the other one requires.
absl::Status Handshake::protect(const Opening& theirs) {
  const Protections needed = opening_.needs | theirs.needs;
  const auto missing = strongest(needed);
  if ((opening_.offers & theirs.offers & bit(missing)) == 0) {
    const bool theirs_lacks = (theirs.offers & bit(missing)) == 0;
    return absl::FailedPreconditionError(absl::StrFormat(
        "%s asks for %s payload and %s does not offer it: use the same setting on both",
        theirs_lacks ? "this side" : "the peer", name(missing),
        theirs_lacks ? "the peer" : "this side"));
  }
  keys_.protection = missing;
  return absl::OkStatus();
}

absl::Status Handshake::derive_root(const Opening& theirs, size_t which) {
  const bool client = role_ == Role::kClient;
  std::string secret(view(key_.hmac("baton handshake", which)));
  if (!options_.one_process) {
    const bool has_uid = theirs.static_key != Key32{};
    const auto shares = agree(share_, theirs.share);
    const auto our_uid = static_key_ ? agree(*static_key_, theirs.share) : Key32{};
    const auto their_uid = has_uid ? agree(share_, theirs.static_key) : Key32{};
    if (!shares || !our_uid || !their_uid) {
      return absl::PermissionDeniedError("the peer's public key is not valid");
    }
    secret.append(view(*shares));
    secret.append(view(client ? *our_uid : *their_uid));
    secret.append(view(client ? *their_uid : *our_uid));
    if (has_uid) peer_uid_.bytes = base::uid_of(theirs.static_key);
  }
  const Key32& ours = opening_.nonce;
  const Key32& other = theirs.nonce;
  root_ = hkdf_extract(std::string(view(client ? ours : other)).append(view(client ? other : ours)),
                       secret);
  said_ = sha256(client_opening_ + server_opening_);
  return absl::OkStatus();
}

Key32 Handshake::derive(Role of, std::string_view what) const {
  return hkdf_expand(root_, absl::StrCat(of == Role::kClient ? "baton client " : "baton server ",
                                         std::string(what), std::string(view(said_))));
}

absl::Status Handshake::on_proof(std::string_view bytes) {
  if (!same(view(derive(Role::kClient, "proof")), bytes.substr(0, kProofBytes))) {
    // Zeros to a peer without the key: nothing to learn.
    base::put_number(out_, kRefused);
    out_.append(kProofBytes, '\0');
    return wrong_key();
  }
  if (padded()) padding_ = base::WireReader(bytes.substr(kProofBytes)).number<uint16_t>();
  if (padding_ > kMostPadding) {
    return absl::InvalidArgumentError("the peer's proof has an impossible length");
  }
  if (padding_ > 0) {
    expect(State::kPadding, padding_);
  } else {
    accept();
  }
  return absl::OkStatus();
}

void Handshake::accept() {
  base::put_number(out_, kAccepted);
  out_.append(view(derive(role_, "proof")));
  if (padding_ > 0) alone_ = out_.size();
  out_.append(padding_, '\0');
  send_info();
}

absl::Status Handshake::on_verdict(std::string_view bytes) {
  base::WireReader in(bytes);
  const uint32_t verdict = in.number<uint32_t>();
  // The server authenticates too: this finds a stranger that accepts any peer.
  if (verdict != kAccepted || !same(view(derive(Role::kServer, "proof")), in.take(kProofBytes))) {
    return wrong_key();
  }
  if (padded() && padding_ > 0) {
    expect(State::kPadding, padding_);
  } else {
    send_info();
  }
  return absl::OkStatus();
}

// Sealed with a key of its own, once: no third party between reads or changes a byte of it.
void Handshake::send_info() {
  sent_info_ = self_.encode();
  std::string length;
  base::put_number(length, static_cast<uint32_t>(sent_info_.size()));
  Aead aead(derive(role_, "info"), Aead::Direction::kSeal);
  aead.start(0);
  aead.authenticate(length.data(), length.size());
  std::string sealed(sent_info_.size() + Aead::kTagBytes, '\0');
  aead.crypt(sent_info_.data(), sent_info_.size(), sealed.data());
  aead.seal(sealed.data() + sent_info_.size());
  out_.append(length).append(sealed);
  expect(State::kLength, length.size());
}

absl::Status Handshake::on_length(std::string_view bytes) {
  const uint32_t length = base::WireReader(bytes).number<uint32_t>();
  if (length == 0 || length > kMaxInfoBytes) {
    return absl::InvalidArgumentError("the peer's introduction has an impossible length");
  }
  length_ = std::string(bytes);
  expect(State::kInfo, length + Aead::kTagBytes);
  return absl::OkStatus();
}

absl::Status Handshake::on_info(std::string_view bytes) {
  std::string info(bytes.size() - Aead::kTagBytes, '\0');
  Aead aead(derive(other(), "info"), Aead::Direction::kOpen);
  aead.start(0);
  aead.authenticate(length_.data(), length_.size());
  aead.crypt(bytes.data(), info.size(), info.data());
  if (!aead.open(bytes.data() + info.size())) {
    return absl::PermissionDeniedError(
        "the peer's introduction was changed in transit: something between the two workers, "
        "outside the cluster, alters traffic");
  }
  auto decoded = HelloInfo::decode(info);
  if (!decoded.ok()) return decoded.status();
  if (!options_.one_process && decoded->uid != peer_uid_) {
    return absl::PermissionDeniedError(absl::StrFormat(
        "the peer claims to be worker %s but cannot prove it: a worker's uid must not be reused",
        decoded->uid.hex()));
  }
  peer_ = *std::move(decoded);
  const bool client = role_ == Role::kClient;
  said_ = sha256(absl::StrCat(std::string(view(said_)), client ? sent_info_ : info,
                              client ? info : sent_info_));
  keys_.version = peer_.protocol = static_cast<uint16_t>(opening_.version);
  keys_.send = derive(role_, "frames");
  keys_.receive = derive(other(), "frames");
  expect(State::kDone, 0);
  return absl::OkStatus();
}

const char* name(Protection protection) {
  constexpr const char* kNames[] = {"plain", "authenticated", "encrypted"};
  static_assert(std::size(kNames) == static_cast<size_t>(Protection::kEncrypt) + 1);
  return base::name_at(kNames, protection, "unknown");
}

namespace {

constexpr size_t kServerReserved = Opening::kIds * Opening::kIdBytes - 5;
constexpr size_t kReserved = 6;

template <typename Wire, typename T>
void members(Wire& wire, T& m, bool client) {
  std::array<uint8_t, kServerReserved> server_reserved{};
  std::array<uint8_t, kReserved> reserved{};
  wire(m.highest, m.purpose, m.lowest, m.nonce, m.share, m.static_key);
  if (client) {
    wire(m.ids);
  } else {
    wire(m.version, m.which, server_reserved);
  }
  wire(m.offers, m.needs, reserved);
}

}  // namespace

std::string Opening::encode(bool client) const {
  std::string out(kMagic);
  base::WireWriter wire(out);
  members(wire, *this, client);
  return out;
}

Opening Opening::decode(std::string_view bytes, bool client) {
  base::WireReader in(bytes);
  Opening out;
  in.take(kMagic.size());
  members(in, out, client);
  return out;
}

}  // namespace baton::net
