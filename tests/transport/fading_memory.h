// Memory that is there when it is registered, and of which a part goes away later.
#pragma once

#include "tests/test.h"

namespace baton {

enum class Fading { kUnmapped, kReadOnly, kTruncated };

inline std::string name_of(Fading how) {
  switch (how) {
    case Fading::kUnmapped:
      return "Unmapped";
    case Fading::kReadOnly:
      return "ReadOnly";
    case Fading::kTruncated:
      return "Truncated";
  }
  return "";
}

// The first half of its bytes stays.
class FadingMemory {
 public:
  FadingMemory(size_t bytes, Fading how) : size(bytes), how_(how) {
    if (how == Fading::kTruncated) {
      fd_ = memfd_create("baton-test", MFD_CLOEXEC);
      EXPECT_EQ(ftruncate(fd_, static_cast<off_t>(bytes)), 0);
    }
    const int flags = fd_ >= 0 ? MAP_SHARED : MAP_PRIVATE | MAP_ANONYMOUS;
    data = static_cast<std::byte*>(mmap(nullptr, bytes, PROT_READ | PROT_WRITE, flags, fd_, 0));
  }
  ~FadingMemory() {
    munmap(data, size);
    if (fd_ >= 0) close(fd_);
  }
  FadingMemory(const FadingMemory&) = delete;
  FadingMemory& operator=(const FadingMemory&) = delete;

  std::byte* half() const { return data + size / 2; }
  void fade() const {
    switch (how_) {
      case Fading::kUnmapped:  // but for its addresses, so that nobody else gets them
        EXPECT_EQ(mprotect(half(), size / 2, PROT_NONE), 0);
        break;
      case Fading::kReadOnly:
        EXPECT_EQ(mprotect(half(), size / 2, PROT_READ), 0);
        break;
      case Fading::kTruncated:
        EXPECT_EQ(ftruncate(fd_, static_cast<off_t>(size / 2)), 0);
        break;
    }
  }

  std::byte* data = nullptr;
  const size_t size;

 private:
  const Fading how_;
  int fd_ = -1;
};

}  // namespace baton
