// Reads whole files with a size limit, and writes them atomically.
#include "engine/files/files.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <filesystem>
#include <system_error>

#include "absl/strings/str_cat.h"
#include "engine/files/absl_view.h"
#include "transport/base/limits/refusals.h"
#include "transport/base/unique_fd.h"

namespace baton::engine {
namespace {

absl::Status failure(int error, std::string_view verb, const std::string& path) {
  return absl::ErrnoToStatus(error, absl::StrCat(view(verb), " ", path, " failed"));
}

absl::Status write_pieces(const std::string& path, std::span<const std::string_view> pieces) {
  uint64_t bytes = 0;
  for (std::string_view piece : pieces) bytes += piece.size();
  if (absl::Status may = base::file_may_have(bytes); !may.ok()) {
    return absl::ResourceExhaustedError(absl::StrCat("writing ", path, ": ", may.message()));
  }
  base::UniqueFd file(::open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644));
  if (file.get() < 0) return failure(errno, "creating", path);
  for (std::string_view piece : pieces) {
    while (!piece.empty()) {
      const ssize_t n = ::write(file.get(), piece.data(), piece.size());
      if (n < 0 && errno == EINTR) continue;
      if (n < 0) return failure(errno, "writing", path);
      piece.remove_prefix(static_cast<size_t>(n));
    }
  }
  if (::fsync(file.get()) != 0) return failure(errno, "syncing", path);
  if (::close(file.release()) != 0) return failure(errno, "closing", path);
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
  const std::string temporary = absl::StrCat(path, ".tmp.", ::getpid());
  absl::Status status = write_pieces(temporary, pieces);
  if (status.ok() && ::rename(temporary.c_str(), path.c_str()) != 0) {
    status = failure(errno, "renaming into", path);
  }
  if (!status.ok()) ::unlink(temporary.c_str());
  return status;
}

absl::Status write_file_atomically(const std::string& path, std::string_view bytes) {
  return write_file_atomically(path, std::span<const std::string_view>(&bytes, 1));
}

absl::Status sync_directory(const std::string& path) {
  const base::UniqueFd directory(::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (directory.get() < 0) return failure(errno, "opening", path);
  if (::fsync(directory.get()) != 0) return failure(errno, "syncing", path);
  return absl::OkStatus();
}

absl::Status make_directories(const std::string& path) {
  std::error_code error;
  std::filesystem::create_directories(path, error);
  if (error) return failure(error.value(), "creating the directory", path);
  return absl::OkStatus();
}

}  // namespace baton::engine
