// Where cluster keys come from, and the encoding of what a worker tells of itself.
#include "transport/identity.h"

#include <fcntl.h>
#include <openssl/evp.h>
#include <openssl/hmac.h>
#include <openssl/rand.h>
#include <pwd.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_split.h"
#include "transport/base/wire.h"

namespace baton {
namespace {

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

// Whoever can read the key can join the cluster, and whoever can write it chooses who joins.
absl::Status check_private(int fd, const std::string& path) {
  struct stat info;
  if (fstat(fd, &info) != 0) {
    return absl::UnavailableError(
        absl::StrFormat("cannot look at the cluster key %s: %s", path, strerror(errno)));
  }
  if (!S_ISREG(info.st_mode)) {
    return absl::PermissionDeniedError(
        absl::StrFormat("the cluster key %s is not a plain file: put the key into one", path));
  }
  // Root may hand a key to a service, and can read every key anyway.
  if (info.st_uid != geteuid() && info.st_uid != 0) {
    return absl::PermissionDeniedError(absl::StrFormat(
        "the cluster key %s belongs to user %d and not to you (user %d), so another may know it or "
        "have chosen it: remove it, or run `chown %d %s && chmod 600 %s` if it is yours",
        path, info.st_uid, geteuid(), geteuid(), path, path));
  }
  if ((info.st_mode & 077) != 0) {
    return absl::PermissionDeniedError(absl::StrFormat(
        "the cluster key %s has mode %04o, so other users can read or change it: run `chmod 600 "
        "%s`, and make a new key if others may have read this one",
        path, info.st_mode & 07777, path));
  }
  return absl::OkStatus();
}

bool is_text(std::string_view bytes) {
  return std::all_of(bytes.begin(), bytes.end(), [](char c) {
    const auto byte = static_cast<unsigned char>(c);
    return absl::ascii_isprint(byte) || absl::ascii_isspace(byte);
  });
}

// Where the user's account says, whatever the environment lacks: never a folder that all share.
absl::StatusOr<std::string> home_of_this_user() {
  if (const char* home = std::getenv("HOME"); home != nullptr && *home != '\0') return home;
  std::vector<char> text(1 << 14);
  passwd account{};
  passwd* found = nullptr;
  getpwuid_r(geteuid(), &account, text.data(), text.size(), &found);
  if (found == nullptr || found->pw_dir == nullptr || *found->pw_dir != '/') {
    return absl::NotFoundError(absl::StrFormat(
        "there is no place for the cluster key: HOME is not set and user %d has no home; set "
        "BATON_KEY_FILE to the path of a key (`openssl rand -hex 32`, mode 0600)",
        geteuid()));
  }
  return found->pw_dir;
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
  key.secrets_.emplace_back(secret);
  return key;
}

ClusterKey ClusterKey::with_previous(const ClusterKey& previous) const {
  ClusterKey both;
  both.secrets_ = {secrets_.front(), previous.secrets_.front()};
  return both;
}

absl::StatusOr<ClusterKey> ClusterKey::from_file(const std::string& path) {
  // Not blocking: should it be a pipe, it is refused and not waited for.
  const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (fd < 0) {
    return absl::NotFoundError(
        absl::StrFormat("cannot read the cluster key %s: %s", path, strerror(errno)));
  }
  if (absl::Status status = check_private(fd, path); !status.ok()) {
    close(fd);
    return status;
  }
  std::string secret(4096, '\0');
  const ssize_t got = read(fd, secret.data(), secret.size());
  close(fd);
  secret.resize(got < 0 ? 0 : static_cast<size_t>(got));
  absl::StripAsciiWhitespace(&secret);
  std::vector<std::string> lines = {secret};
  if (is_text(secret)) lines = absl::StrSplit(secret, '\n', absl::SkipWhitespace());
  if (lines.size() > kMost) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "%s has %u lines: a key file holds the key in its first line and, while the cluster "
        "changes its key, the previous one in its second",
        path, lines.size()));
  }
  absl::StatusOr<ClusterKey> key;
  for (std::string& line : lines) {
    absl::StripAsciiWhitespace(&line);
    auto one = from_bytes(line);
    if (!one.ok()) {
      return absl::InvalidArgumentError(absl::StrCat(path, ": ", one.status().message()));
    }
    key = key.ok() ? key->with_previous(*one) : *std::move(one);
  }
  return key.ok() ? key : from_bytes("");
}

absl::StatusOr<ClusterKey> ClusterKey::for_this_user() {
  if (const char* path = std::getenv("BATON_KEY_FILE"); path != nullptr && *path != '\0') {
    return from_file(path);
  }
  std::string dir;
  if (const char* config = std::getenv("XDG_CONFIG_HOME"); config != nullptr && *config != '\0') {
    dir = config;
  } else {
    absl::StatusOr<std::string> home = home_of_this_user();
    if (!home.ok()) return home.status();
    dir = *home + "/.config";
  }
  const std::string path = dir + "/baton/cluster.key";
  if (access(path.c_str(), F_OK) != 0) {
    if (absl::Status made = fill_random_key_file(path); !made.ok()) return made;
  }
  return from_file(path);
}

std::array<uint8_t, 32> ClusterKey::hmac(std::string_view message, size_t which) const {
  std::array<uint8_t, 32> out{};
  unsigned int length = 0;
  const std::string& secret = secrets_[which];
  HMAC(EVP_sha256(), secret.data(), static_cast<int>(secret.size()),
       reinterpret_cast<const unsigned char*>(message.data()), message.size(), out.data(), &length);
  return out;
}

uint64_t link_number() {
  // Both sides of a session dial, each from its own process: a forked one has this start too, but
  // another pid.
  static const auto kStart = [] {
    uint64_t start = 0;
    RAND_bytes(reinterpret_cast<unsigned char*>(&start), sizeof start);
    return start;
  }();
  static std::atomic<uint64_t> last{0};
  const uint64_t mine = kStart + (static_cast<uint64_t>(getpid()) << 22);
  return (mine + last.fetch_add(1, std::memory_order_relaxed) + 1) << 20;
}

std::string HelloInfo::encode() const {
  std::string out(reinterpret_cast<const char*>(uid.bytes.data()), uid.bytes.size());
  base::put_number(out, session);
  base::put_number(out, link);
  base::put_number(out, static_cast<uint8_t>(resume));
  base::put_number(out, rail);
  base::put_number(out, rails);
  base::put_number(out, pid);
  base::put_text(out, std::string_view(name).substr(0, kMaxWorkerName));
  base::put_text(out, extra);
  base::put_text(out, address.size() <= kMaxHelloAddress ? address : std::string());
  return out;
}

absl::StatusOr<HelloInfo> HelloInfo::decode(std::string_view bytes) {
  base::WireReader in(bytes);
  HelloInfo info;
  const std::string_view uid = in.take(info.uid.bytes.size());
  if (!uid.empty()) std::memcpy(info.uid.bytes.data(), uid.data(), uid.size());
  info.session = in.number<uint64_t>();
  info.link = in.number<uint64_t>();
  const uint8_t resume = in.number<uint8_t>();
  info.resume = static_cast<Resume>(resume);
  info.rail = in.number<uint16_t>();
  info.rails = in.number<uint16_t>();
  info.pid = in.number<uint32_t>();
  info.name = in.text(kMaxWorkerName);
  info.extra = in.text(512);
  info.address = in.text(kMaxHelloAddress);
  if (!in.finished() || info.rails == 0 || info.rail >= info.rails ||
      resume > static_cast<uint8_t>(Resume::kTheirs)) {
    return absl::InvalidArgumentError("the peer sent a malformed introduction");
  }
  // Names end up in messages and terminals: keep them printable.
  for (char& c : info.name) {
    if (!absl::ascii_isgraph(static_cast<unsigned char>(c))) c = '?';
  }
  return info;
}

}  // namespace baton
