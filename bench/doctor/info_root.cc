// Reads files below a root: /proc and /sys of this machine, or a copy of them.
#include "bench/doctor/info.h"

#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <filesystem>
#include <fstream>

namespace baton::bench {
namespace {

namespace fs = std::filesystem;
constexpr size_t kMostText = 1 << 20;

// "2" before "10", "eth0" before "eth1".
bool before(const std::string& a, const std::string& b) {
  const bool numbers = !a.empty() && !b.empty() &&
                       a.find_first_not_of("0123456789") == std::string::npos &&
                       b.find_first_not_of("0123456789") == std::string::npos;
  if (numbers && a.size() != b.size()) return a.size() < b.size();
  return a < b;
}

}  // namespace

bool SystemRoot::exists(const std::string& path) const {
  std::error_code error;
  return fs::exists(prefix_ + path, error);
}

bool SystemRoot::writable(const std::string& path) const {
  return access((prefix_ + path).c_str(), R_OK | W_OK) == 0;
}

std::string SystemRoot::text(const std::string& path) const {
  std::ifstream file(prefix_ + path);
  std::string out(kMostText, '\0');
  file.read(out.data(), static_cast<std::streamsize>(out.size()));
  out.resize(static_cast<size_t>(std::max<std::streamsize>(0, file.gcount())));
  out.erase(out.find_last_not_of(" \t\r\n") + 1);
  return out;
}

std::optional<uint64_t> SystemRoot::number(const std::string& path) const {
  const std::string content = text(path);
  uint64_t value = 0;
  const auto end = std::from_chars(content.data(), content.data() + content.size(), value);
  return end.ec == std::errc() ? std::optional(value) : std::nullopt;
}

std::vector<std::string> SystemRoot::list(const std::string& path) const {
  std::vector<std::string> names;
  std::error_code error;
  for (fs::directory_iterator it(prefix_ + path, error), end; !error && it != end;
       it.increment(error)) {
    names.push_back(it->path().filename().string());
  }
  std::sort(names.begin(), names.end(), before);
  return names;
}

std::string SystemRoot::real(const std::string& path) const {
  std::error_code error;
  const std::string root = prefix_.empty() ? "" : fs::canonical(prefix_, error).string();
  const std::string resolved = fs::canonical(prefix_ + path, error).string();
  if (error || resolved.compare(0, root.size(), root) != 0) return "";
  return resolved.substr(root.size());
}

}  // namespace baton::bench
