// The handshake's state machine, and where cluster keys come from.
#include "transport/handshake.h"

#include <fcntl.h>
#include <openssl/crypto.h>
#include <openssl/evp.h>
#include <openssl/hmac.h>
#include <openssl/rand.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "transport/wire.h"

namespace baton {
namespace {

constexpr std::string_view kMagic = "BATON\r\n\x1a";
constexpr size_t kNonceBytes = 32;
constexpr size_t kHelloBytes = 8 + 4 + 4 + kNonceBytes;
constexpr size_t kMacBytes = 32;
constexpr size_t kMaxInfoBytes = 1024;
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

absl::Status fill_random_key_file(const std::string& path) {
  std::error_code error;
  std::filesystem::create_directories(std::filesystem::path(path).parent_path(), error);
  std::array<unsigned char, 32> secret;
  RAND_bytes(secret.data(), static_cast<int>(secret.size()));
  std::string hex;
  for (unsigned char byte : secret) absl::StrAppendFormat(&hex, "%02x", byte);
  // Made under another name and linked: a second process either sees no file or a whole one.
  const std::string draft = absl::StrFormat("%s.%d", path, getpid());
  const int fd = open(draft.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
  if (fd < 0 || write(fd, hex.data(), hex.size()) != static_cast<ssize_t>(hex.size())) {
    const int why = errno;
    if (fd >= 0) close(fd);
    return absl::UnavailableError(
        absl::StrFormat("cannot make a cluster key at %s: %s; make one yourself and set "
                        "BATON_KEY_FILE to its path",
                        path, strerror(why)));
  }
  close(fd);
  if (link(draft.c_str(), path.c_str()) != 0 && errno != EEXIST) {
    std::filesystem::rename(draft, path, error);
  }
  unlink(draft.c_str());
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<ClusterKey> ClusterKey::from_bytes(std::string_view secret) {
  if (secret.size() < 16) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "a cluster key needs at least 16 bytes, this one has %u: make one with `openssl rand -hex "
        "32`",
        secret.size()));
  }
  ClusterKey key;
  key.secret_ = std::string(secret);
  return key;
}

absl::StatusOr<ClusterKey> ClusterKey::from_file(const std::string& path) {
  const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0) {
    return absl::NotFoundError(
        absl::StrFormat("cannot read the cluster key %s: %s", path, strerror(errno)));
  }
  std::string secret(4096, '\0');
  const ssize_t got = read(fd, secret.data(), secret.size());
  close(fd);
  secret.resize(got < 0 ? 0 : static_cast<size_t>(got));
  absl::StripAsciiWhitespace(&secret);
  auto key = from_bytes(secret);
  if (!key.ok()) {
    return absl::InvalidArgumentError(absl::StrCat(path, ": ", key.status().message()));
  }
  return key;
}

absl::StatusOr<ClusterKey> ClusterKey::for_this_user() {
  if (const char* path = std::getenv("BATON_KEY_FILE"); path != nullptr && *path != '\0') {
    return from_file(path);
  }
  std::string dir;
  if (const char* config = std::getenv("XDG_CONFIG_HOME"); config != nullptr && *config != '\0') {
    dir = config;
  } else if (const char* home = std::getenv("HOME"); home != nullptr && *home != '\0') {
    dir = absl::StrCat(home, "/.config");
  } else {
    dir = absl::StrFormat("/tmp/baton-%d", getuid());
  }
  const std::string path = dir + "/baton/cluster.key";
  if (access(path.c_str(), F_OK) != 0) {
    if (absl::Status made = fill_random_key_file(path); !made.ok()) return made;
  }
  return from_file(path);
}

std::array<uint8_t, 32> ClusterKey::hmac(std::string_view message) const {
  std::array<uint8_t, 32> out{};
  unsigned int length = 0;
  HMAC(EVP_sha256(), secret_.data(), static_cast<int>(secret_.size()),
       reinterpret_cast<const unsigned char*>(message.data()), message.size(), out.data(), &length);
  return out;
}

std::string HelloInfo::encode() const {
  std::string out(reinterpret_cast<const char*>(uid.bytes.data()), uid.bytes.size());
  put_number(out, session);
  put_number(out, rail);
  put_number(out, rails);
  put_number(out, pid);
  put_text(out, std::string_view(name).substr(0, 64));
  put_text(out, extra);
  return out;
}

absl::StatusOr<HelloInfo> HelloInfo::decode(std::string_view bytes) {
  WireReader in(bytes);
  HelloInfo info;
  const std::string_view uid = in.take(info.uid.bytes.size());
  if (!uid.empty()) std::memcpy(info.uid.bytes.data(), uid.data(), uid.size());
  info.session = in.number<uint64_t>();
  info.rail = in.number<uint16_t>();
  info.rails = in.number<uint16_t>();
  info.pid = in.number<uint32_t>();
  info.name = in.text(64);
  info.extra = in.text(512);
  if (!in.finished() || info.rails == 0 || info.rail >= info.rails) {
    return absl::InvalidArgumentError("the peer sent a malformed introduction");
  }
  // Names end up in messages and terminals: keep them printable.
  for (char& c : info.name) {
    if (!absl::ascii_isgraph(static_cast<unsigned char>(c))) c = '?';
  }
  return info;
}

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
      auto info = HelloInfo::decode(bytes);
      if (info.ok()) {
        peer_ = *std::move(info);
        expect(State::kDone, 0);
      }
      status = info.status();
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
      return absl::InvalidArgumentError("the peer's greeting has an unknown purpose");
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
  expect(State::kInfo, length);
  return absl::OkStatus();
}

void Handshake::send_info() {
  const std::string info = self_.encode();
  put_number(out_, static_cast<uint32_t>(info.size()));
  out_ += info;
}

}  // namespace baton
