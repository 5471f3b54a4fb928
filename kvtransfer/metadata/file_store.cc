// Writes, locks and renames the files of a folder that is used as a store.
#include "kvtransfer/metadata/file_store.h"

#include <fcntl.h>
#include <pthread.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <mutex>
#include <set>

#include "absl/strings/str_cat.h"
#include "transport/base/limits/refusals.h"

namespace baton::kvtransfer {
namespace {

absl::Status failed(const std::string& path) {
  const int error = errno;
  const std::string text = absl::StrCat(path, ": ", std::strerror(error));
  if (error == ENOENT) return absl::NotFoundError(text);
  return absl::UnavailableError(absl::StrCat(
      text, "; the folder of the metadata must be there, and writable by all of its agents"));
}

// The locks of all stores of this process. A lock is the open file's, which a forked child has too:
// it closes them. No thread is in the middle of taking one while another thread forks.
class HeldLocks {
 public:
  using Locks = std::map<std::string, base::UniqueFd>;

  static HeldLocks& instance() {
    static auto* all = new HeldLocks;  // fork() uses it until the process ends
    return *all;
  }
  void add(Locks* locks) {
    std::lock_guard lock(mutex);
    all_.insert(locks);
  }
  void remove(Locks* locks) {
    std::lock_guard lock(mutex);
    all_.erase(locks);
    locks->clear();
  }

  std::mutex mutex;

 private:
  HeldLocks() {
    pthread_atfork([] { instance().mutex.lock(); }, [] { instance().mutex.unlock(); },
                   [] { instance().forked(); });
  }
  // In the child, which has one thread, and may call only what is safe in a signal's handler.
  void forked() {
    for (Locks* locks : all_) {
      for (auto& [key, fd] : *locks) fd.reset();
    }
    mutex.unlock();
  }

  std::set<Locks*> all_;
};

// Locks of the open file, not of the process: two agents of one process are two owners.
struct flock whole(short type) {
  struct flock out {};
  out.l_type = type;
  out.l_whence = SEEK_SET;
  return out;
}

// A file of the folder itself. Who may write the folder can put anything there: what a name leads
// to elsewhere is not touched, and nothing that is no file is waited for.
absl::StatusOr<base::UniqueFd> open_file(const std::string& path, int flags) {
  base::UniqueFd fd(
      ::open(path.c_str(), flags | O_NOFOLLOW | O_NONBLOCK | O_NOCTTY | O_CLOEXEC, 0600));
  if (!fd.valid()) return failed(path);
  struct stat found {};
  if (fstat(fd.get(), &found) != 0) return failed(path);
  if (S_ISREG(found.st_mode)) return fd;
  return absl::UnavailableError(
      absl::StrCat(path, " is not a file: remove it, and check who may write to this folder"));
}

bool same_file(int fd, const std::string& path) {
  struct stat open {
  }, named{};
  return fstat(fd, &open) == 0 && stat(path.c_str(), &named) == 0 && open.st_ino == named.st_ino &&
         open.st_dev == named.st_dev;
}

absl::Status write_all(int fd, std::string_view bytes, const std::string& path) {
  if (absl::Status may = base::file_may_have(bytes.size()); !may.ok()) return may;
  while (!bytes.empty()) {
    const ssize_t n = ::write(fd, bytes.data(), bytes.size());
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return failed(path);
    bytes.remove_prefix(static_cast<size_t>(n));
  }
  return absl::OkStatus();
}

absl::StatusOr<std::string> read_all(const std::string& path) {
  const absl::StatusOr<base::UniqueFd> fd = open_file(path, O_RDONLY);
  if (!fd.ok()) return fd.status();
  std::string out;
  char part[65536];
  for (ssize_t n; (n = ::read(fd->get(), part, sizeof part)) != 0;) {
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return failed(path);
    out.append(part, static_cast<size_t>(n));
    if (out.size() > kMaxStoredMetadata) {
      return absl::DataLossError(path + " is too long to be metadata");
    }
  }
  return out;
}

}  // namespace

absl::Status FileStore::check(const std::string& folder) {
  struct stat found {};
  if (stat(folder.c_str(), &found) != 0 && errno == ENOENT) {
    return absl::NotFoundError(
        absl::StrCat("metadata store \"file://", folder,
                     "\": there is no such folder on this machine; create it, or mount it, before "
                     "its agents start"));
  }
  const bool is_folder = S_ISDIR(found.st_mode);
  if (is_folder && ::access(folder.c_str(), R_OK | W_OK | X_OK) == 0) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrCat(
      "metadata store \"file://", folder,
      "\": ", is_folder || found.st_mode == 0 ? std::strerror(errno) : "it is not a folder",
      "; every agent has to be able to write there"));
}

FileStore::FileStore(std::string folder) : folder_(std::move(folder)) {
  HeldLocks::instance().add(&ours_);
}
FileStore::~FileStore() { HeldLocks::instance().remove(&ours_); }

absl::Status FileStore::take(const std::string& key) {
  std::lock_guard lock_of_all(HeldLocks::instance().mutex);
  if (const auto has = ours_.find(key); has != ours_.end()) {
    if (same_file(has->second.get(), lock(key))) return absl::OkStatus();
    ours_.erase(has);  // another process removed it
  }
  while (true) {
    absl::StatusOr<base::UniqueFd> fd = open_file(lock(key), O_RDWR | O_CREAT);
    if (!fd.ok()) {
      const absl::Status& why = fd.status();
      return absl::IsNotFound(why) ? absl::UnavailableError(why.message()) : why;
    }
    struct flock wanted = whole(F_WRLCK);
    if (fcntl(fd->get(), F_OFD_SETLK, &wanted) != 0) {
      if (errno == EINTR) continue;
      if (errno != EAGAIN && errno != EACCES) return failed(lock(key));
      return absl::AlreadyExistsError(absl::StrCat("another live process has locked ", lock(key)));
    }
    if (!same_file(fd->get(), lock(key))) continue;  // its last owner removed it meanwhile
    ours_.emplace(key, *std::move(fd));
    return absl::OkStatus();
  }
}

absl::Status FileStore::put(const std::string& key, std::string_view bytes) {
  if (absl::Status taken = take(key); !taken.ok()) return taken;
  const std::string fresh = file(key) + ".new";  // only its owner writes it
  ::unlink(fresh.c_str());                       // of one that died, or a stranger's
  const absl::StatusOr<base::UniqueFd> fd = open_file(fresh, O_WRONLY | O_CREAT | O_EXCL);
  if (!fd.ok()) return fd.status();
  if (absl::Status written = write_all(fd->get(), bytes, fresh); !written.ok()) return written;
  return std::rename(fresh.c_str(), file(key).c_str()) == 0 ? absl::OkStatus() : failed(fresh);
}

absl::Status FileStore::remove(const std::string& key) {
  const auto has = ours_.find(key);
  if (has == ours_.end()) return absl::OkStatus();
  if (same_file(has->second.get(), lock(key))) {
    ::unlink(file(key).c_str());
    ::unlink(lock(key).c_str());
  }
  std::lock_guard lock_of_all(HeldLocks::instance().mutex);
  ours_.erase(has);
  return absl::OkStatus();
}

absl::Status FileStore::renew() {
  for (const auto& [key, fd] : ours_) {
    if (!same_file(fd.get(), lock(key)) || ::access(file(key).c_str(), F_OK) != 0) {
      return absl::NotFoundError(file(key) + " was removed by another process");
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<std::string> FileStore::get(const std::string& key) {
  const absl::StatusOr<base::UniqueFd> fd = open_file(lock(key), O_RDWR);
  if (!fd.ok()) return fd.status();
  struct flock held = whole(F_WRLCK);
  if (fcntl(fd->get(), F_OFD_GETLK, &held) != 0) return failed(lock(key));
  if (held.l_type == F_UNLCK) {
    return absl::NotFoundError(absl::StrCat("the process that wrote ", file(key), " has ended"));
  }
  return read_all(file(key));
}

}  // namespace baton::kvtransfer
