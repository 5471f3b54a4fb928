// Memory files: sealed memfds of our own, and mappings of those that a peer sent us.
#pragma once

#include <cstddef>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "transport/base/unique_fd.h"

namespace baton::shm {

// A shared mapping of a whole file. Unmapped with the object.
class MappedFile {
 public:
  enum class Protection { kReadOnly, kReadWrite };

  MappedFile() = default;
  MappedFile(MappedFile&& other) noexcept;
  MappedFile& operator=(MappedFile&& other) noexcept;
  ~MappedFile();

  // Maps a file that a peer sent, after checking that touching the mapping cannot raise SIGBUS
  // because the peer truncates the file: it must be a memfd of at least `bytes` bytes, sealed
  // against shrinking. `what` names it in messages.
  static absl::StatusOr<MappedFile> map(int fd, size_t bytes, Protection protection,
                                        const char* what);

  std::byte* data() const { return data_; }
  size_t size() const { return size_; }
  template <typename T>
  T* as() const {
    return reinterpret_cast<T*>(data_);
  }

  // Faults in the next `bytes` bytes, so that no copy waits for a page fault; false when all of it
  // is there (or the kernel cannot, before 5.14).
  bool populate(size_t bytes);
  bool populated() const { return populated_ >= size_; }

 private:
  std::byte* data_ = nullptr;
  size_t size_ = 0;
  size_t populated_ = 0;
};

// A new memfd of zeros with a mapping of it, sealed against changes of its size.
struct OwnFile {
  base::UniqueFd fd;
  MappedFile mapping;
};
absl::StatusOr<OwnFile> create_file(const char* name, size_t bytes);

// From now on no process can map the file writable or write to it; mappings that exist stay
// writable.
void forbid_new_writers(int fd);

// Whether the file can be handed to peers: a memfd that cannot shrink. Seals it where it can.
bool shareable(int fd);

}  // namespace baton::shm
