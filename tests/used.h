// What a process has open, before and after something that must leave nothing behind.
#pragma once

#include "tests/std.h"

namespace baton {

inline size_t entries_of(const std::string& folder) {
  size_t count = 0;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    (void)entry;
    ++count;
  }
  return count;
}

struct Used {
  size_t descriptors = entries_of("/proc/self/fd");
  size_t threads = entries_of("/proc/self/task");
  size_t shared_mappings = 0, shared_bytes = 0;

  Used() {
    std::ifstream maps("/proc/self/maps");
    for (std::string line; std::getline(maps, line);) {
      if (line.find(" rw-s ") == std::string::npos && line.find(" r--s ") == std::string::npos) {
        continue;
      }
      ++shared_mappings;
      shared_bytes += std::stoull(line.substr(line.find('-') + 1), nullptr, 16) -
                      std::stoull(line, nullptr, 16);
    }
  }
  bool within(const Used& most) const {
    return descriptors <= most.descriptors && threads <= most.threads &&
           shared_mappings <= most.shared_mappings && shared_bytes <= most.shared_bytes;
  }
  std::string text() const {
    std::ostringstream out;
    out << descriptors << " descriptors, " << threads << " threads, " << shared_mappings
        << " shared mappings of " << shared_bytes / 1024 << " KiB";
    return out.str();
  }
};

}  // namespace baton
