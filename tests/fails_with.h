// What a call that must fail says.
#pragma once

#include "tests/test.h"

namespace baton {

using Code = absl::StatusCode;

// A status of this code whose text has all of these parts.
inline testing::Matcher<const absl::Status&> fails_with(Code code,
                                                        const std::vector<std::string>& parts) {
  std::vector<testing::Matcher<std::string>> each;
  for (const std::string& part : parts) each.push_back(testing::HasSubstr(part));
  return testing::AllOf(
      testing::Property("code", &absl::Status::code, code),
      testing::ResultOf([](const absl::Status& status) { return std::string(status.message()); },
                        testing::AllOfArray(each)));
}

}  // namespace baton
