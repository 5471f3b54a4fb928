// The log and the environment: levels, wrong values, names that nobody reads; and nearest names.
#include "transport/base/log.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <stdlib.h>

#include <string>
#include <utility>
#include <vector>

#include "transport/base/environment.h"
#include "transport/base/nearest_name.h"

namespace baton {
namespace {

using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;

// Lines of the log while it lives.
class Captured {
 public:
  explicit Captured(LogLevel least) {
    set_log_level(least);
    set_log_sink([this](LogLevel, std::string_view line) { lines.emplace_back(line); });
  }
  ~Captured() {
    set_log_sink(nullptr);
    set_log_level(LogLevel::kError);
  }
  std::vector<std::string> lines;
};

TEST(Log, WritesWhatIsWantedAndFormatsNothingElse) {
  const Captured log(LogLevel::kInfo);
  log_event(LogLevel::kDebug, "%s", "too little");
  log_event(LogLevel::kInfo, "%s has %d", "one", 1);
  log_event(LogLevel::kError, "%s", "worse");
  EXPECT_THAT(log.lines, ElementsAre("one has 1", "worse"));
  set_log_level(LogLevel::kOff);
  log_event(LogLevel::kError, "%s", "unheard");
  EXPECT_THAT(log.lines, testing::SizeIs(2));
}

TEST(Log, GoesToStandardErrorWithItsLevel) {
  testing::internal::CaptureStderr();
  write_log(LogLevel::kWarning, "a line");
  EXPECT_THAT(testing::internal::GetCapturedStderr(),
              AllOf(HasSubstr("warning"), HasSubstr("a line\n")));
}

TEST(Log, LevelsHaveNames) {
  EXPECT_EQ(*parse_log_level("trace"), LogLevel::kTrace);
  EXPECT_EQ(*parse_log_level("warning"), LogLevel::kWarning);
  EXPECT_EQ(*parse_log_level("off"), LogLevel::kOff);
  EXPECT_THAT(std::string(parse_log_level("inof").status().message()),
              HasSubstr("did you mean info?"));
  EXPECT_TRUE(absl::IsInvalidArgument(parse_log_level("").status()));
}

TEST(Environment, NamesThatNobodyReadAreWrong) {
  EXPECT_THAT(wrong_environment(), IsEmpty());
  setenv("BATON_KEYFILE", "/key", 1);
  EXPECT_THAT(wrong_environment(), ElementsAre(AllOf(HasSubstr("BATON_KEYFILE"),
                                                     HasSubstr("did you mean BATON_KEY_FILE?"))));
  unsetenv("BATON_KEYFILE");
  setenv("BATON_X", "", 1);
  EXPECT_THAT(wrong_environment(), ElementsAre(HasSubstr("env -u BATON_X baton info --settings")));
  unsetenv("BATON_X");
}

TEST(NearestName, CountsEditsAndSwaps) {
  const std::vector<std::string> known = {"tcp.sockets", "tcp.slice_kib", "shm.cma"};
  EXPECT_EQ(nearest_name("tcp.sokets", known), "tcp.sockets");
  EXPECT_EQ(nearest_name("tpc.scokets", known), "tcp.sockets");
  EXPECT_EQ(nearest_name("tcp.slicekib", known), "tcp.slice_kib");
  EXPECT_EQ(nearest_name("shm.cm", known), "shm.cma");
  EXPECT_EQ(nearest_name("frobnicate", known), std::nullopt);
  EXPECT_EQ(nearest_name("tcp", {}), std::nullopt);
  EXPECT_EQ(nearest_name("tpc", {"ucx", "tcp"}), "tcp");
  EXPECT_EQ(did_you_mean("tcp.sokets", known), "; did you mean tcp.sockets?");
  EXPECT_EQ(did_you_mean("frobnicate", known), "");
}

}  // namespace
}  // namespace baton
