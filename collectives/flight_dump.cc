// Where the flight recorder goes when a call fails.
#include "collectives/flight_dump.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cctype>
#include <cerrno>
#include <cstdlib>
#include <filesystem>
#include <system_error>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

namespace baton::collectives {
namespace {

bool write_all(int fd, std::string_view text) {
  while (!text.empty()) {
    const ssize_t wrote = write(fd, text.data(), text.size());
    if (wrote < 0 && errno == EINTR) continue;
    if (wrote <= 0) return false;
    text.remove_prefix(static_cast<size_t>(wrote));
  }
  return true;
}

// The user's own plain file, emptied.
int open_own(const std::string& path) {
  const int fd = open(path.c_str(), O_WRONLY | O_CREAT | O_NOFOLLOW | O_CLOEXEC | O_NONBLOCK, 0600);
  if (fd < 0) return -1;
  struct stat status {};
  if (fstat(fd, &status) == 0 && S_ISREG(status.st_mode) && status.st_uid == geteuid() &&
      status.st_nlink == 1 && ftruncate(fd, 0) == 0) {
    return fd;
  }
  close(fd);
  errno = EPERM;
  return -1;
}

}  // namespace

std::string flight_path(const std::string& group, uint32_t rank) {
  const char* wanted = std::getenv("BATON_FLIGHT_RECORDER");
  std::string prefix = wanted == nullptr ? "" : wanted;
  if (prefix == "none") return "";
  if (prefix.empty()) {
    std::string name = group;
    for (char& c : name) {
      if (std::isalnum(static_cast<unsigned char>(c)) == 0) c = '_';
    }
    std::error_code error;
    const auto directory = std::filesystem::temp_directory_path(error);
    prefix = absl::StrFormat("%s/baton-flight-%u-%s", error ? "/tmp" : directory.c_str(), geteuid(),
                             name.substr(0, 64));
  }
  return absl::StrCat(prefix, ".", rank, ".json");
}

std::string dump_flight_record(const FlightRecorder& recorder, const std::string& path) {
  if (path.empty()) return "";
  const int fd = open_own(path);
  bool written = fd >= 0 && write_all(fd, recorder.to_json());
  const int why = errno;
  if (fd >= 0) written &= close(fd) == 0;
  if (written) return absl::StrCat("; its last events are in ", path);
  return absl::StrFormat(
      "; its last events could not be written to %s (%s): set "
      "BATON_FLIGHT_RECORDER to a place that can",
      path, std::generic_category().message(why));
}

}  // namespace baton::collectives
