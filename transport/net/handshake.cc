// The handshake: what each side sends and checks, one step at a time.
#include "transport/net/handshake.h"

#include <openssl/crypto.h>
#include <openssl/rand.h>

#include <array>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "transport/base/wire.h"

namespace baton::net {
namespace {

constexpr std::string_view kMagic = "BATON\r\n\x1a";
constexpr size_t kNonceBytes = 32;
constexpr size_t kHelloBytes = 8 + 4 + 4 + kNonceBytes;
constexpr size_t kMacBytes = 32;
constexpr size_t kMaxInfoBytes = 2048;
constexpr uint32_t kAccepted = 1;
constexpr uint32_t kRefused = 2;

std::string make_hello(uint32_t purpose) {
  std::string out(kMagic);
  put_number(out, kProtocolVersion);
  put_number(out, purpose);
  std::array<unsigned char, kNonceBytes> nonce;
  RAND_bytes(nonce.data(), static_cast<int>(nonce.size()));
  out.append(reinterpret_cast<const char*>(nonce.data()), nonce.size());
  return out;
}

absl::Status wrong_key() {
  return absl::PermissionDeniedError(
      "authentication failed: the two workers hold different cluster keys; give both the same file "
      "(--key-file or BATON_KEY_FILE)");
}

}  // namespace

Handshake::Handshake(Role role, const ClusterKey& key, HelloInfo self, Purpose purpose)
    : role_(role), key_(key), self_(std::move(self)), purpose_(purpose) {
  if (role_ == Role::kClient) {
    client_hello_ = make_hello(static_cast<uint32_t>(purpose));
    out_ = client_hello_;
  }
  expect(State::kHello, kHelloBytes);
}

void Handshake::expect(State state, size_t bytes) {
  state_ = state;
  wanted_ = bytes;
}

absl::Status Handshake::receive(std::string_view bytes) {
  if (bytes.size() != wanted_ || state_ == State::kDone || state_ == State::kFailed) {
    return absl::InternalError("the handshake was fed bytes that it did not ask for");
  }
  absl::Status status;
  switch (state_) {
    case State::kHello:
      status = on_hello(bytes);
      break;
    case State::kProof:
      status = on_proof(bytes);
      break;
    case State::kVerdict:
      status = on_verdict(bytes);
      break;
    case State::kLength:
      status = on_length(bytes);
      break;
    case State::kInfo: {
      const std::string_view said = bytes.substr(0, bytes.size() - kMacBytes);
      const auto proof = info_proof(role_ == Role::kClient ? Role::kServer : Role::kClient, said);
      if (CRYPTO_memcmp(proof.data(), bytes.data() + said.size(), proof.size()) != 0) {
        status = absl::PermissionDeniedError(
            "the peer's introduction was changed on its way: somebody between the two workers is "
            "no part of the cluster");
        break;
      }
      auto info = HelloInfo::decode(said);
      status = info.status();
      if (info.ok()) {
        peer_ = *std::move(info);
        expect(State::kDone, 0);
      }
      break;
    }
    case State::kDone:
    case State::kFailed:
      break;
  }
  if (!status.ok()) expect(State::kFailed, 0);
  return status;
}

absl::Status Handshake::on_hello(std::string_view bytes) {
  WireReader in(bytes);
  if (in.take(kMagic.size()) != kMagic) {
    return absl::InvalidArgumentError(
        "the other side does not speak Baton's protocol: check the address and the port");
  }
  const uint32_t version = in.number<uint32_t>();
  const uint32_t purpose = in.number<uint32_t>();
  if (role_ == Role::kServer) {
    client_hello_ = std::string(bytes);
    server_hello_ = make_hello(0);
    out_ += server_hello_;  // also to a foreign version, so that it can say what is wrong
  } else {
    server_hello_ = std::string(bytes);
  }
  if (version != kProtocolVersion) {
    return absl::FailedPreconditionError(
        absl::StrFormat("the peer speaks protocol version %u, this side %u: install the same Baton "
                        "on both",
                        version, kProtocolVersion));
  }
  if (role_ == Role::kServer) {
    if (purpose != static_cast<uint32_t>(Purpose::kRail) &&
        purpose != static_cast<uint32_t>(Purpose::kQuery)) {
      return absl::InvalidArgumentError("the peer's hello has an unknown purpose");
    }
    purpose_ = static_cast<Purpose>(purpose);
    expect(State::kProof, kMacBytes);
    return absl::OkStatus();
  }
  const auto proof = key_.hmac(absl::StrCat("baton client", client_hello_, server_hello_));
  out_.append(reinterpret_cast<const char*>(proof.data()), proof.size());
  expect(State::kVerdict, 4 + kMacBytes);
  return absl::OkStatus();
}

absl::Status Handshake::on_proof(std::string_view bytes) {
  const auto proof = key_.hmac(absl::StrCat("baton client", client_hello_, server_hello_));
  const bool right = CRYPTO_memcmp(proof.data(), bytes.data(), proof.size()) == 0;
  std::array<uint8_t, kMacBytes> answer{};  // zeros to a peer without the key: nothing to learn
  if (right) answer = key_.hmac(absl::StrCat("baton server", client_hello_, server_hello_));
  put_number(out_, right ? kAccepted : kRefused);
  out_.append(reinterpret_cast<const char*>(answer.data()), answer.size());
  if (!right) return wrong_key();
  send_info();
  expect(State::kLength, 4);
  return absl::OkStatus();
}

absl::Status Handshake::on_verdict(std::string_view bytes) {
  WireReader in(bytes);
  const uint32_t verdict = in.number<uint32_t>();
  const auto answer = key_.hmac(absl::StrCat("baton server", client_hello_, server_hello_));
  const std::string_view theirs = in.take(kMacBytes);
  // The server proves itself too: a stranger that accepts anybody is found out here.
  if (verdict != kAccepted || CRYPTO_memcmp(answer.data(), theirs.data(), answer.size()) != 0) {
    return wrong_key();
  }
  send_info();
  expect(State::kLength, 4);
  return absl::OkStatus();
}

absl::Status Handshake::on_length(std::string_view bytes) {
  const uint32_t length = WireReader(bytes).number<uint32_t>();
  if (length == 0 || length > kMaxInfoBytes) {
    return absl::InvalidArgumentError("the peer's introduction has an impossible length");
  }
  expect(State::kInfo, length + kMacBytes);
  return absl::OkStatus();
}

void Handshake::send_info() {
  const std::string info = self_.encode();
  put_number(out_, static_cast<uint32_t>(info.size()));
  out_ += info;
  const auto proof = info_proof(role_, info);
  out_.append(reinterpret_cast<const char*>(proof.data()), proof.size());
}

// What a side says of itself is as much its own as the proof: nobody between changes a byte of it.
std::array<uint8_t, kMacBytes> Handshake::info_proof(Role of, std::string_view info) const {
  return key_.hmac(absl::StrCat(of == Role::kClient ? "baton client info" : "baton server info",
                                client_hello_, server_hello_, std::string(info)));
}

}  // namespace baton::net
