// Reads whole files with a size limit, and writes them atomically.
#include "engine/files/files.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstdio>
#include <filesystem>
#include <system_error>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "engine/files/utf8.h"
#include "transport/base/limits/refusals.h"
#include "transport/base/unique_fd.h"

namespace baton::engine {
namespace {

absl::Status failure(int error, std::string_view verb, const std::string& path) {
  return absl::ErrnoToStatus(error, absl::StrCat(view(verb), " ", path, " failed"));
}

// A file's real place, with links followed.
struct Target {
  std::string path;
  int descriptor = -1;  // of this process: "/dev/stdout", "/dev/fd/63"
  mode_t mode = 0;      // of what is there; 0: nothing
  bool replaced() const { return descriptor < 0 && (mode == 0 || S_ISREG(mode)); }
};

Target target_of(std::string path) {
  namespace fs = std::filesystem;
  constexpr int kMostLinks = 40;  // as many as the kernel follows
  for (int links = 0; links < kMostLinks; ++links) {
    for (const std::string_view folder : {"/proc/self/fd/", "/dev/fd/"}) {
      int number = -1;
      if (path.starts_with(folder) && absl::SimpleAtoi(path.substr(folder.size()), &number)) {
        return {path, number, 0};
      }
    }
    struct stat info {};
    if (::lstat(path.c_str(), &info) != 0) return {path, -1, 0};
    if (!S_ISLNK(info.st_mode)) return {path, -1, info.st_mode};
    std::error_code error;
    const fs::path to = fs::read_symlink(path, error);
    if (error) break;
    path = (to.is_absolute() ? to : fs::path(path).parent_path() / to).string();
  }
  return {path, -1, 0};
}

absl::Status write_all(const base::UniqueFd& file, const std::string& path,
                       std::span<const std::string_view> pieces) {
  for (std::string_view piece : pieces) {
    while (!piece.empty()) {
      const ssize_t n = ::write(file.get(), piece.data(), piece.size());
      if (n < 0 && errno == EINTR) continue;
      if (n < 0) return failure(errno, "writing", path);
      piece.remove_prefix(static_cast<size_t>(n));
    }
  }
  return absl::OkStatus();
}

// A new file at `path`, with the bits of `mode` if there are any.
absl::Status write_new(const std::string& path, mode_t mode,
                       std::span<const std::string_view> pieces) {
  uint64_t bytes = 0;
  for (std::string_view piece : pieces) bytes += piece.size();
  if (absl::Status may = base::file_may_have(bytes); !may.ok()) {
    return absl::ResourceExhaustedError(absl::StrCat("writing ", path, ": ", may.message()));
  }
  base::UniqueFd file(::open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644));
  if (file.get() < 0) return failure(errno, "creating", path);
  if (mode != 0 && ::fchmod(file.get(), mode & 07777) != 0) return failure(errno, "making", path);
  if (absl::Status status = write_all(file, path, pieces); !status.ok()) return status;
  if (::fsync(file.get()) != 0) return failure(errno, "syncing", path);
  if (::close(file.release()) != 0) return failure(errno, "closing", path);
  return absl::OkStatus();
}

absl::Status write_through(const Target& target, std::span<const std::string_view> pieces) {
  std::fflush(nullptr);  // what was printed before stands before it
  base::UniqueFd file(target.descriptor >= 0
                          ? ::fcntl(target.descriptor, F_DUPFD_CLOEXEC, 0)
                          : ::open(target.path.c_str(), O_WRONLY | O_TRUNC | O_CLOEXEC));
  if (file.get() < 0) return failure(errno, "opening", target.path);
  if (absl::Status status = write_all(file, target.path, pieces); !status.ok()) return status;
  if (::close(file.release()) != 0) return failure(errno, "closing", target.path);
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::string> read_file(const std::string& path, size_t max_bytes) {
  base::UniqueFd file(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  if (file.get() < 0) return failure(errno, "opening", path);
  struct stat info {};
  if (::fstat(file.get(), &info) != 0) return failure(errno, "examining", path);
  if (!S_ISREG(info.st_mode)) {
    return absl::InvalidArgumentError(absl::StrCat(path, " is not a regular file"));
  }
  if (static_cast<size_t>(info.st_size) > max_bytes) {
    return absl::ResourceExhaustedError(absl::StrCat(
        path, " has ", info.st_size, " bytes; at most ", max_bytes, " are read from such a file"));
  }
  std::string bytes(static_cast<size_t>(info.st_size), '\0');
  size_t have = 0;
  while (have < bytes.size()) {
    const ssize_t n = ::read(file.get(), bytes.data() + have, bytes.size() - have);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return failure(errno, "reading", path);
    if (n == 0) break;
    have += static_cast<size_t>(n);
  }
  bytes.resize(have);
  return bytes;
}

absl::Status write_file_atomically(const std::string& path,
                                   std::span<const std::string_view> pieces) {
  const Target target = target_of(path);
  if (!target.replaced()) return write_through(target, pieces);
  const std::string temporary = absl::StrCat(target.path, ".tmp.", ::getpid());
  absl::Status status = write_new(temporary, target.mode, pieces);
  bool in_the_way = absl::IsPermissionDenied(status);  // the directory, not the file
  if (status.ok() && ::rename(temporary.c_str(), target.path.c_str()) != 0) {
    in_the_way = errno == EBUSY || errno == EACCES || errno == EPERM;
    status = failure(errno, "renaming into", path);
  }
  if (!status.ok()) ::unlink(temporary.c_str());
  return in_the_way && target.mode != 0 ? write_through(target, pieces) : status;
}

bool is_replaced(const std::string& path) { return target_of(path).replaced(); }

absl::Status write_file_atomically(const std::string& path, std::string_view bytes) {
  return write_file_atomically(path, std::span<const std::string_view>(&bytes, 1));
}

absl::Status sync_directory(const std::string& path) {
  const base::UniqueFd directory(::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (directory.get() < 0) return failure(errno, "opening", path);
  if (::fsync(directory.get()) != 0) return failure(errno, "syncing", path);
  return absl::OkStatus();
}

FolderLock::FolderLock(std::string file, base::UniqueFd held)
    : file_(std::move(file)), held_(std::move(held)), owner_(::getpid()) {}

FolderLock::~FolderLock() {
  if (held_.get() >= 0 && owner_ == ::getpid()) ::unlink(file_.c_str());
}

absl::StatusOr<FolderLock> FolderLock::take(const std::string& folder) {
  const std::string path = folder + "/.lock";
  while (true) {
    base::UniqueFd file(::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0644));
    if (file.get() < 0) return failure(errno, "creating", path);
    std::array<char, 512> text{};
    // A file system that knows no locks gives none, and is no reason not to write.
    if (::flock(file.get(), LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK) {
      const ssize_t size = ::pread(file.get(), text.data(), text.size() - 1, 0);
      return absl::AlreadyExistsError(
          absl::StrCat(folder, " is being written by ", size > 0 ? text.data() : "another process",
                       ": name another folder, or wait until it has finished"));
    }
    struct stat info {};
    if (::fstat(file.get(), &info) != 0) return failure(errno, "examining", path);
    if (info.st_nlink == 0) continue;  // its holder has just removed it
    ::gethostname(text.data(), text.size() - 1);
    const std::string who = absl::StrCat("process ", ::getpid(), " of ", text.data());
    if (::ftruncate(file.get(), 0) != 0 ||
        ::pwrite(file.get(), who.data(), who.size(), 0) < static_cast<ssize_t>(who.size())) {
      return failure(errno, "writing", path);
    }
    return FolderLock(path, std::move(file));
  }
}

absl::Status make_directories(const std::string& path) {
  std::error_code error;
  std::filesystem::create_directories(path, error);
  if (error) return failure(error.value(), "creating the directory", path);
  return absl::OkStatus();
}

}  // namespace baton::engine
