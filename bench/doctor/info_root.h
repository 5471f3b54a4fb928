// Reading /proc and /sys, of this machine or of a tree of files that looks like one.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace baton::bench {

// Every reader below takes one, so that tests can show it other machines. Paths are absolute, as on
// the machine itself.
class SystemRoot {
 public:
  explicit SystemRoot(std::string prefix = "") : prefix_(std::move(prefix)) {}

  bool exists(const std::string& path) const;
  // May be opened for reading and writing.
  bool writable(const std::string& path) const;
  // The content without the white space at its end, at most 1 MiB; "" where there is none.
  std::string text(const std::string& path) const;
  // The number that the content begins with.
  std::optional<uint64_t> number(const std::string& path) const;
  // The names in a folder, numbers in their order; empty where there is none.
  std::vector<std::string> list(const std::string& path) const;
  // The path with its links followed, from the root on; "" where it leads nowhere.
  std::string real(const std::string& path) const;

 private:
  std::string prefix_;
};

}  // namespace baton::bench
