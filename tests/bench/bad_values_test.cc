// Every flag of every command that names a range or a list of words in its help, with values that
// are none: status 2 and one line that says what would do, before anything is started.
#include "absl/strings/match.h"
#include "absl/strings/str_split.h"
#include "tests/bench/command.h"
#include "tests/sanitized.h"
#include "tests/temporary_folder.h"
#include "tests/test.h"

namespace baton::bench {
namespace {

using testing::HasSubstr;

// One of each that have the same flags.
std::vector<std::string> commands() {
  std::vector<std::string> names;
  for (const absl::string_view line : absl::StrSplit(baton("--help").output, '\n')) {
    const std::vector<std::string> words = absl::StrSplit(line, ' ', absl::SkipEmpty());
    if (!absl::StartsWith(line, "  ") || words.size() < 2 || words[0][0] == '-') continue;
    if (!absl::EndsWith(words[0], "_perf") || words[0] == "all_reduce_perf") {
      names.push_back(words[0]);
    }
  }
  return names;
}

// "--port" where a line of help begins with "  -p, --port 0..65535"; "" where it names no range.
std::string ranged_flag(const std::string& line) {
  const std::vector<std::string> words = absl::StrSplit(line, ' ', absl::SkipEmpty());
  size_t at = 0;
  while (at < words.size() && absl::EndsWith(words[at], ",")) ++at;
  if (at + 1 >= words.size()) return "";
  if (!absl::StartsWith(line, "  -")) return "";
  const std::string& value = words[at + 1];
  const bool range = absl::StrContains(value, "..") && value.find_first_of("0123456789") == 0;
  return range || value.front() == '{' ? words[at] : "";
}

TEST(Commands, RefuseWhatIsInNoRange) {
  size_t tried = 0;
  std::vector<const char*> values = {"12x", "''", "nan", "-7", "99999999999999999999"};
  values.resize(static_cast<size_t>(rounds_of(5, 1)));  // each is a process
  const std::vector<std::string> names = commands();
  EXPECT_THAT(names, testing::IsSupersetOf({"serve", "demo", "train", "kv_store", "write_bw"}));
  for (const std::string& command : names) {
    for (const absl::string_view text : absl::StrSplit(baton(command + " --help").output, '\n')) {
      const std::string flag = ranged_flag(std::string(text));
      if (flag.empty()) continue;
      for (const char* value : values) {
        const Ended ended = baton(absl::StrCat(command, " ", flag, " ", value));
        EXPECT_EQ(ended.status, 2) << command << " " << flag << " " << value << ended.output;
        EXPECT_EQ(std::count(ended.output.begin(), ended.output.end(), '\n'), 1) << ended.output;
        EXPECT_THAT(ended.output, HasSubstr(absl::StrCat("baton ", command, ": ")));
        ++tried;
      }
    }
  }
  EXPECT_GT(tried, 60 * values.size());
}

// Before the tokenizer is learned: not a word of that.
TEST(Commands, TrainResumesFromNothingOnlyToSaySo) {
  const TemporaryFolder folder;
  for (const char* ranks : {"", " --ranks 2"}) {
    const Ended ended = baton(absl::StrCat("train --resume ", folder.path(), ranks));
    EXPECT_EQ(ended.status, 1) << ended.output;
    EXPECT_EQ(ended.output,
              absl::StrCat("baton train: there is no complete checkpoint in ", folder.path(),
                           ": a directory step-NNNNNNNN with a manifest.json. Start without "
                           "--resume\n"));
  }
}

}  // namespace
}  // namespace baton::bench
