// Whole files in and out: read with a size limit, write atomically.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <span>
#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "transport/base/unique_fd.h"

namespace baton::engine {

// Reads a regular file. NotFound, PermissionDenied or ResourceExhausted (larger than `max_bytes`).
absl::StatusOr<std::string> read_file(const std::string& path, size_t max_bytes = size_t{1} << 30);

// Writes the pieces to a temporary file in the same directory, fsyncs, renames it over `path`, with
// the mode of a file that was there. On failure nothing is left behind and the old file stays.
// Links are followed: their target is replaced and the links stay. A path that is not a regular
// file (a device, a FIFO, a descriptor such as /dev/stdout) is written to directly, and so is a
// file in a directory that may not be written to, or one that is mounted by itself.
absl::Status write_file_atomically(const std::string& path,
                                   std::span<const std::string_view> pieces);
absl::Status write_file_atomically(const std::string& path, std::string_view bytes);

// True if write_file_atomically() replaces `path`: it is a regular file or does not exist yet.
// Rewrite only such files periodically; a stream would get the whole content each time.
bool is_replaced(const std::string& path);

// Makes what was created and renamed in the directory outlast a crash of the machine.
absl::Status sync_directory(const std::string& path);

// mkdir -p.
absl::Status make_directories(const std::string& path);

// A folder that is being written: no other process can lock it, on this machine or (over NFS)
// another one, until this is destroyed or its process has ended. Holds a file ".lock" there, which
// goes with it. A forked child may use it, and leaves the file alone.
class FolderLock {
 public:
  // AlreadyExists, naming the process that writes there.
  static absl::StatusOr<FolderLock> take(const std::string& folder);
  FolderLock(FolderLock&&) = default;
  FolderLock& operator=(FolderLock&&) = delete;
  ~FolderLock();

 private:
  FolderLock(std::string file, base::UniqueFd held);
  std::string file_;
  base::UniqueFd held_;
  pid_t owner_;
};

}  // namespace baton::engine
