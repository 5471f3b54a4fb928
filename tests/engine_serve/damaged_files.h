// Files of a KV tier on disk that have become others.
#pragma once

#include "tests/test.h"

namespace baton::engine::serve {

// Every so many bytes of each file one is another, and half a record is from another place.
inline void damage(const std::string& directory) {
  for (const auto& entry : std::filesystem::directory_iterator(directory)) {
    const int file = open(entry.path().c_str(), O_RDWR);
    ASSERT_GE(file, 0);
    struct stat status {};
    ASSERT_EQ(fstat(file, &status), 0);
    std::mt19937_64 random(5);
    for (off_t at = 0; at < status.st_size; at += 20000) {
      const auto byte = static_cast<char>(random());
      ASSERT_EQ(pwrite(file, &byte, 1, at + static_cast<off_t>(random() % 10000)), 1);
    }
    std::vector<char> part(1 << 14);
    for (off_t at = 1 << 16; at + (1 << 16) < status.st_size; at += 1 << 17) {
      ASSERT_EQ(pread(file, part.data(), part.size(), at), ssize_t(part.size()));
      ASSERT_EQ(pwrite(file, part.data(), part.size(), at + 4096 * 5), ssize_t(part.size()));
    }
    close(file);
  }
}

}  // namespace baton::engine::serve
