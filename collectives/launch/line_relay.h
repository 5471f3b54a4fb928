// The output of a rank on its way to the launcher's, with the rank before every line.
#pragma once

#include <string>
#include <string_view>

#include "absl/status/statusor.h"
#include "transport/base/unique_fd.h"

namespace baton::launch {

class LineRelay {
 public:
  // Relays to descriptor `to` of this process. In the child, call become() before writing.
  static absl::StatusOr<LineRelay> create(std::string prefix, int to);

  // In the child: makes the pipe its descriptor `to`.
  void become();
  // In the launcher, after the fork.
  void child_has_it() { write_end_ = base::UniqueFd(); }
  // Passes on the whole lines that are there; false: the other end is closed.
  bool relay();
  // Passes on everything that is there, whole or not.
  void finish();
  int fd() const { return read_end_.get(); }

 private:
  LineRelay(std::string prefix, int to, base::UniqueFd read_end, base::UniqueFd write_end);
  void put(std::string_view line);

  std::string prefix_;
  int to_;
  base::UniqueFd read_end_;
  base::UniqueFd write_end_;
  std::string pending_;
};

}  // namespace baton::launch
