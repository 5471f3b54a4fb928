// Buffers between sockets and memory of transfers: where bytes come in before it is known where
// they belong, and where they are sealed.
//
// They are parts of a file of memory, so that the kernel can copy out of them and into them: it
// looks where a copy of our own would crash when the memory of a transfer has gone away, for the
// price of a pread() (0.2 us), and tells. Where this process may have no such file, or no larger
// one, a buffer is anonymous memory, and a fault ends the copy (base/copies/fault_guard.h).
#pragma once

#include <sys/types.h>
#include <sys/uio.h>

#include <cstddef>
#include <vector>

#include "transport/base/unique_fd.h"

namespace baton::tcp {

class FileBuffers {
 public:
  struct Buffer {
    char* data = nullptr;
    off_t at = 0;  // in the file; kNoFile: anonymous memory
  };

  // Buffers of `bytes` each.
  explicit FileBuffers(size_t bytes);
  FileBuffers(const FileBuffers&) = delete;
  FileBuffers& operator=(const FileBuffers&) = delete;

  // Pages that are not used cost nothing. Its data is null where there is no room left in this
  // process's address space.
  Buffer take();
  void give_back(const Buffer& buffer);

  // Copies from `from`, which is somewhere in `buffer`, to `pieces`. How many bytes found memory
  // that may be written: less than there are when one of the pieces has none.
  size_t copy_out(const Buffer& buffer, const char* from, const iovec* pieces, size_t count) const;
  // Copies `bytes` from `data` to `to`, which is somewhere in `buffer`. False: they cannot be read.
  bool copy_in(const Buffer& buffer, char* to, const void* data, size_t bytes) const;

  // Whether all of this memory can be read. It is read.
  bool readable(const iovec& memory);

 private:
  bool make_part();
  void free_up(off_t at) const;
  bool write(off_t at, const void* data, size_t bytes) const;

  static constexpr off_t kNoFile = -1;
  base::UniqueFd file_;  // -1: this process may not have one
  const size_t bytes_;
  off_t end_ = 0;            // of the file
  std::vector<off_t> free_;  // parts that no reader uses
};

}  // namespace baton::tcp
