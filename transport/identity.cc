// Reads and creates cluster keys; encodes what a worker tells a peer about itself.
#include "transport/identity.h"

#include <fcntl.h>
#include <openssl/evp.h>
#include <openssl/hmac.h>
#include <pwd.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <filesystem>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_split.h"
#include "transport/base/limits/refusals.h"
#include "transport/base/threads/forks.h"
#include "transport/base/wire.h"
#include "transport/base/worker_keys.h"

namespace baton {
namespace {

constexpr size_t kMostKeyFile = 4096;

// All of it, on the disk: a machine that loses its power must not come up with a key of zeros.
bool write_durably(int fd, std::string_view bytes) {
  if (!base::file_may_have(bytes.size()).ok()) return errno = EFBIG, false;
  const ssize_t put = write(fd, bytes.data(), bytes.size());
  if (put >= 0 && static_cast<size_t>(put) != bytes.size()) errno = ENOSPC;
  return put == static_cast<ssize_t>(bytes.size()) && fsync(fd) == 0;
}

absl::Status fill_random_key_file(const std::string& path) {
  std::error_code error;
  std::filesystem::create_directories(std::filesystem::path(path).parent_path(), error);
  std::array<unsigned char, 32> secret;
  base::fill_with_secret(secret.data(), secret.size());
  std::string hex;
  for (unsigned char byte : secret) absl::StrAppendFormat(&hex, "%02x", byte);
  // The file is written under a temporary name and then linked to its final name, unless that
  // exists by now. Other threads, processes and containers therefore see no file or a complete one,
  // and it never changes.
  std::string draft = path + ".XXXXXX";
  const int fd = mkostemp(draft.data(), O_CLOEXEC);
  const bool written = fd >= 0 && write_durably(fd, hex);
  int why = fd < 0 && error ? error.value() : errno;
  // No process has it open for writing when it gets its name: see Writers.
  if (fd >= 0) close(fd);
  bool made = false;
  if (written) {
    made = link(draft.c_str(), path.c_str()) == 0 || errno == EEXIST ||
           renameat2(AT_FDCWD, draft.c_str(), AT_FDCWD, path.c_str(), RENAME_NOREPLACE) == 0 ||
           errno == EEXIST;
    why = errno;
  }
  if (fd >= 0) unlink(draft.c_str());
  if (made) return absl::OkStatus();
  return absl::FailedPreconditionError(
      absl::StrFormat("cannot make a cluster key at %s: %s; make one yourself and set "
                      "BATON_KEY_FILE to its path",
                      path, strerror(why)));
}

// Why there is no key at `path`, after open() has failed.
absl::Status cannot_open(const std::string& path, int why) {
  const std::string what = absl::StrFormat("cannot read the cluster key %s: ", path);
  switch (why) {
    case ENOENT:
    case ENOTDIR:
      return absl::NotFoundError(absl::StrFormat(
          "%s%s; copy the cluster's key there, or make one for all its workers: `(umask 077; "
          "openssl rand -hex 32 > %s)`",
          what, strerror(why), path));
    case EACCES:
    case EPERM:
      return absl::PermissionDeniedError(absl::StrFormat(
          "%s%s; it must belong to the user who runs this (user %d), with mode 0600: run `chown %d "
          "%s && chmod 600 %s`, or to root, with mode 0440 and a group of this process; the "
          "folders above it must be searchable (mode x)",
          what, strerror(why), geteuid(), geteuid(), path, path));
    case EMFILE:
    case ENFILE:
    case ENOMEM:
      return base::refused(absl::StrCat("cannot read the cluster key ", path), why);
    case ENXIO:  // a socket
      return absl::PermissionDeniedError(what + "it is not a plain file: put the key into one");
    default:
      return absl::NotFoundError(what + strerror(why));
  }
}

// Keeps writers out of a file that is being read: open() for writing and truncate() block in the
// kernel until the lease is released, some microseconds later.
class Writers {
 public:
  // `reader`: a descriptor that is open for reading only.
  explicit Writers(int reader) : fd_(reader) {
    // A signal tells us of waiters; by default it would end the process.
    if (fcntl(fd_, F_SETSIG, SIGURG) != 0) return;
    held_off_ = fcntl(fd_, F_SETLEASE, F_RDLCK) == 0;
    there_ = !held_off_ && (errno == EAGAIN || errno == EBUSY);
  }
  ~Writers() {
    if (held_off_) fcntl(fd_, F_SETLEASE, F_UNLCK);
  }
  Writers(const Writers&) = delete;
  Writers& operator=(const Writers&) = delete;

  // A process has the file open for writing. False also where the file system, or whose the file
  // is, does not let one ask.
  bool there() const { return there_; }

 private:
  const int fd_;
  bool held_off_ = false, there_ = false;
};

absl::Status being_written(const std::string& path) {
  return absl::UnavailableError(absl::StrFormat(
      "the cluster key %s is being written: try again. To change a key, write a new file and "
      "rename it to this name (`mv`), so that every reader gets either the old or the new one",
      path));
}

// What the file holds, which is never more than a key may have.
absl::StatusOr<std::string> read_once(int fd, const std::string& path) {
  std::string bytes(kMostKeyFile + 1, '\0');
  size_t have = 0;
  while (have < bytes.size()) {
    const ssize_t got =
        pread(fd, bytes.data() + have, bytes.size() - have, static_cast<off_t>(have));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) {
      return absl::FailedPreconditionError(
          absl::StrFormat("cannot read the cluster key %s: %s", path, strerror(errno)));
    }
    if (got == 0) break;
    have += static_cast<size_t>(got);
  }
  bytes.resize(have);
  if (have > kMostKeyFile) {
    // Two that differ behind what is read would pass for one.
    return absl::InvalidArgumentError(absl::StrFormat(
        "%s has more than the %u bytes that a key file may have: is it one? `openssl rand -hex 32` "
        "makes 65",
        path, kMostKeyFile));
  }
  if (have > 0 && bytes.find_first_not_of('\0') == std::string::npos) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "%s holds nothing but zeros, as a file that was not written to its end: make the key again "
        "with `openssl rand -hex 32`",
        path));
  }
  return bytes;
}

// Since the file was last written; negative where that is to come.
std::chrono::nanoseconds quiet_for(int fd) {
  struct stat info;
  timespec now;
  if (fstat(fd, &info) != 0 || clock_gettime(CLOCK_REALTIME, &now) != 0) return {};
  return std::chrono::seconds(now.tv_sec - info.st_mtim.tv_sec) +
         std::chrono::nanoseconds(now.tv_nsec - info.st_mtim.tv_nsec);
}

// Times and sizes as they were, and twice the same bytes: no writer has come between.
absl::StatusOr<std::string> read_twice(int fd, const std::string& path) {
  struct stat before {
  }, after{};
  const auto looked = [&](struct stat& info) { return fstat(fd, &info) == 0; };
  if (!looked(before)) return being_written(path);
  absl::StatusOr<std::string> bytes = read_once(fd, path);
  if (!bytes.ok()) return bytes;
  const auto again = read_once(fd, path);
  const auto time_of = [](const timespec& at) { return std::pair(at.tv_sec, at.tv_nsec); };
  if (!again.ok() || *again != *bytes || !looked(after) || before.st_size != after.st_size ||
      time_of(before.st_mtim) != time_of(after.st_mtim) ||
      static_cast<size_t>(after.st_size) != bytes->size()) {
    return being_written(path);
  }
  return bytes;
}

// Reads one complete key. A writer of the file is kept out by a lease, waited for, or detected by
// reading twice.
absl::StatusOr<std::string> read_key(int fd, const std::string& path) {
  // A writer that has written nothing for this long has finished and only not closed the file.
  constexpr std::chrono::milliseconds kQuiet{100};
  constexpr std::chrono::seconds kPatience{2};
  const auto end = std::chrono::steady_clock::now() + kPatience;
  while (true) {
    {
      const Writers writers(fd);
      if (!writers.there() || quiet_for(fd) >= kQuiet) return read_twice(fd, path);
    }
    if (std::chrono::steady_clock::now() >= end) return being_written(path);
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

bool is_in_group(gid_t group) {
  if (group == getegid()) return true;
  const int most = getgroups(0, nullptr);
  std::vector<gid_t> groups(static_cast<size_t>(std::max(most, 0)));
  const int count = getgroups(static_cast<int>(groups.size()), groups.data());
  groups.resize(static_cast<size_t>(std::max(count, 0)));
  return std::find(groups.begin(), groups.end(), group) != groups.end();
}

// A process that can read the key can join the cluster; one that can write it decides who joins.
absl::Status check_private(int fd, const std::string& path) {
  struct stat info;
  if (fstat(fd, &info) != 0) {
    return absl::FailedPreconditionError(
        absl::StrFormat("cannot look at the cluster key %s: %s", path, strerror(errno)));
  }
  if (!S_ISREG(info.st_mode)) {
    return absl::PermissionDeniedError(
        absl::StrFormat("the cluster key %s is not a plain file: put the key into one", path));
  }
  // Root may hand a key to a service, and can read every key anyway.
  if (info.st_uid != geteuid() && info.st_uid != 0) {
    return absl::PermissionDeniedError(absl::StrFormat(
        "the cluster key %s belongs to user %d and not to you (user %d), so another user may know "
        "it or have chosen it: remove it, or run `chown %d %s && chmod 600 %s` if it is yours",
        path, info.st_uid, geteuid(), geteuid(), path, path));
  }
  if ((info.st_mode & 077) == 0) return absl::OkStatus();
  // A Kubernetes Secret with fsGroup: root's file, which a group of this process may read. Root
  // itself changes the mode instead, unless the volume is mounted read-only.
  struct statvfs volume {};
  const bool is_given = info.st_uid == 0 && (info.st_mode & 037) == 0 && is_in_group(info.st_gid);
  if (is_given &&
      (geteuid() != 0 || (fstatvfs(fd, &volume) == 0 && (volume.f_flag & ST_RDONLY) != 0))) {
    return absl::OkStatus();
  }
  return absl::PermissionDeniedError(absl::StrFormat(
      "the cluster key %s has mode %04o, so other users can read or change it: run `chmod 600 %s`, "
      "and make a new key if others may have read this one. For a mounted key, such as a "
      "Kubernetes Secret, set its mode (defaultMode: 0400, or 0440 with an fsGroup)",
      path, info.st_mode & 07777, path));
}

bool is_text(std::string_view bytes) {
  return std::all_of(bytes.begin(), bytes.end(), [](char c) {
    const auto byte = static_cast<unsigned char>(c);
    return absl::ascii_isprint(byte) || absl::ascii_isspace(byte);
  });
}

// $HOME, or the account's home folder if HOME is not set: never a folder that several users share.
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
  if (path.empty()) {
    return absl::InvalidArgumentError(
        "the path of the cluster key is empty: name a file, or leave the setting out to use this "
        "user's own key");
  }
  // Not blocking: should it be a pipe, it is refused and not waited for.
  const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (fd < 0) return cannot_open(path, errno);
  const absl::Status is_private = check_private(fd, path);
  absl::StatusOr<std::string> content = is_private.ok() ? read_key(fd, path) : is_private;
  close(fd);
  if (!content.ok()) return content.status();
  std::string secret = *std::move(content);
  absl::StripAsciiWhitespace(&secret);
  std::vector<std::string> lines = {secret};
  if (is_text(secret)) lines = absl::StrSplit(secret, '\n', absl::SkipWhitespace());
  if (lines.empty()) lines.emplace_back();
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
  return key;
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
  const base::ForkWaits fork_waits(base::ForkWaits::kMoment);  // OpenSSL has locks
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
    base::fill_with_secret(&start, sizeof start);
    return start;
  }();
  static std::atomic<uint64_t> last{0};
  const uint64_t mine = kStart + (static_cast<uint64_t>(getpid()) << 22);
  return (mine + last.fetch_add(1, std::memory_order_relaxed) + 1) << 20;
}

namespace {

template <typename Wire, typename T>
void hello_members(Wire& wire, T& m) {
  wire(m.uid.bytes, m.session, m.link, m.resume, m.rail, m.rails, m.pid);
  wire.text(m.name, kMaxWorkerName);
  wire.text(m.extra, 512);
}

}  // namespace

std::string HelloInfo::encode() const {
  std::string out;
  base::WireWriter wire(out);
  hello_members(wire, *this);
  wire.text(address.size() <= kMaxHelloAddress ? address : std::string(), kMaxHelloAddress);
  return out;
}

absl::StatusOr<HelloInfo> HelloInfo::decode(std::string_view bytes) {
  base::WireReader in(bytes);
  HelloInfo info;
  hello_members(in, info);
  in.text(info.address, kMaxHelloAddress);
  if (!in.finished() || info.rails == 0 || info.rail >= info.rails ||
      info.resume > Resume::kTheirs) {
    return absl::InvalidArgumentError("the peer sent a malformed introduction");
  }
  // Names end up in messages and terminals: keep them printable.
  for (char& c : info.name) {
    if (!absl::ascii_isgraph(static_cast<unsigned char>(c))) c = '?';
  }
  return info;
}

}  // namespace baton
