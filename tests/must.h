// must(call): what it gave, where it succeeded; else it ends the test, by throwing where it stands
// and why. On a thread of the test's own that ends the process. Not for forked children.
#pragma once

#include <exception>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_format.h"

namespace baton {

class Failed : public std::exception {
 public:
  explicit Failed(absl::Status why, const char* file = __builtin_FILE(),
                  int line = __builtin_LINE())
      : status(std::move(why)),
        words_(absl::StrFormat("%s:%d: %s", file, line, status.ToString())) {}
  const char* what() const noexcept override { return words_.c_str(); }
  absl::Status status;

 private:
  std::string words_;
};

inline void must(const absl::Status& status, const char* file = __builtin_FILE(),
                 int line = __builtin_LINE()) {
  if (!status.ok()) throw Failed(status, file, line);
}
template <typename T>
T must(absl::StatusOr<T> made, const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
  must(made.status(), file, line);
  return *std::move(made);
}

}  // namespace baton
