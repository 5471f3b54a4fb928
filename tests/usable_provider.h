// For tests that run over every registered provider: whether this machine can use one.
#pragma once

#include <type_traits>

#include "tests/test.h"
#include "transport/worker.h"

namespace baton {

// Empty where `provider` works here; otherwise why not, with the remedy: the reason to skip.
inline std::string why_unusable(const std::string& provider) {
  // Sanitizer builds are without some.
  if (const absl::Status linked = check_provider(provider); !linked.ok()) {
    return std::string(linked.message());
  }
  WorkerOptions options;
  options.name = "is-it-usable";
  options.key = *ClusterKey::from_bytes("a key for this question only");
  options.providers = {provider};
  options.require = provider;
  const auto worker = Worker::create(options);
  return absl::IsUnavailable(worker.status()) ? std::string(worker.status().message()) : "";
}

// A fixture of tests that take a provider's name, alone or as the first of a tuple.
template <typename Param>
class OverEveryProvider : public ::testing::TestWithParam<Param> {
 protected:
  const std::string& provider() const {
    if constexpr (std::is_same_v<Param, std::string>) {
      return this->GetParam();
    } else {
      return std::get<0>(this->GetParam());
    }
  }
  void SetUp() override {
    const std::string why = why_unusable(provider());
    if (!why.empty()) GTEST_SKIP() << why;
  }
};

}  // namespace baton
