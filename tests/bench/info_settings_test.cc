// The table of settings against everything that is written about settings: docs/settings.md, and
// every text in the sources that recommends one.
#include <regex>

#include "bench/doctor/info.h"
#include "tests/sanitized.h"
#include "tests/test.h"
#include "transport/base/environment.h"
#include "transport/provider.h"

namespace baton::bench {
namespace {

using testing::AllOf;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::Not;

namespace fs = std::filesystem;

std::string contents(const fs::path& path) {
  std::ifstream in(path);
  return {std::istreambuf_iterator<char>(in), {}};
}

// What people read or run: sources, scripts and pages, without the tests.
std::vector<fs::path> shipped() {
  std::vector<fs::path> out = {fs::path(BATON_SOURCE) / "run"};
  const fs::path root = BATON_SOURCE;
  for (const auto& entry : fs::directory_iterator(root)) {
    if (entry.path().extension() == ".md") out.push_back(entry.path());
  }
  for (const char* room : {"bench", "collectives", "docs", "engine", "examples", "gpudirect",
                           "kvtransfer", "plugins", "scripts", "transport", "verbs"}) {
    for (const auto& entry : fs::recursive_directory_iterator(root / room)) {
      const std::string kind = entry.path().extension();
      if (entry.is_regular_file() &&
          (kind == ".cc" || kind == ".h" || kind == ".md" || kind.empty())) {
        out.push_back(entry.path());
      }
    }
  }
  return out;
}

// Every match of `pattern` in what is shipped that is not in `known`, with the file it stands in.
std::vector<std::string> unknown(const std::regex& pattern, const std::set<std::string>& known) {
  std::vector<std::string> out;
  size_t matches = 0;
  for (const fs::path& path : shipped()) {
    const std::string text = contents(path);
    for (std::sregex_iterator at(text.begin(), text.end(), pattern), end; at != end; ++at) {
      ++matches;
      const std::string name = (*at)[1];
      if (known.find(name) == known.end()) out.push_back(absl::StrCat(path.string(), ": ", name));
    }
  }
  EXPECT_GT(matches, 5u) << "nothing was read";
  return out;
}

std::set<std::string> setting_names() {
  std::set<std::string> names;
  for (const Setting& row : known_settings()) names.emplace(row.name);
  return names;
}

bool linked(const std::string& provider) { return check_provider(provider).ok(); }

// The names of providers that this build has, as a group of a regular expression.
std::string providers() {
  std::string out;
  for (const auto& [name, factory] : registered_providers()) {
    absl::StrAppend(&out, out.empty() ? "" : "|", name);
  }
  return out;
}

TEST(Settings, EveryOneThatIsRecommendedExists) {
  if (kSanitized) GTEST_SKIP() << "it reads the tree, which is the same for all builds";
  // "tcp.sockets=4", "raise verbs.qps", "`shm.cma`": a provider, a dot, and a name that is neither
  // a file's nor a call.
  const std::regex pattern(absl::StrCat("(?:^|[\\s\"`(,;=])((?:", providers(),
                                        ")\\.(?!(?:cc|h|md|so)\\b)[a-z][a-z_]+)\\b(?!\\()"));
  EXPECT_THAT(unknown(pattern, setting_names()), IsEmpty());
}

TEST(Settings, EveryEnvironmentVariableThatIsNamedExists) {
  if (kSanitized) GTEST_SKIP() << "it reads the tree, which is the same for all builds";
  std::set<std::string> names;
  for (const base::EnvironmentVariable& row : base::known_environment()) names.emplace(row.name);
  // Read, or told about: not the macros of the build.
  const std::regex pattern("(?:getenv\\(\"|\"|\\$\\{|env )(BATON_[A-Z][A-Z_]+)[\":=]");
  EXPECT_THAT(unknown(pattern, names), IsEmpty());
}

TEST(Settings, EveryEnvironmentVariableOfTheTableIsRead) {
  std::string all;
  for (const fs::path& path : shipped()) {
    if (path.extension() == ".md") continue;
    std::string text = contents(path);
    if (path.filename() == "environment.cc" && path.parent_path().filename() == "base") {
      text.erase(text.find("kVariables"), text.find("};", text.find("kVariables")) -
                                              text.find("kVariables"));  // the table itself
    }
    all += text;
  }
  all += contents(fs::path(BATON_SOURCE) / "tests/seeds.h");
  all += contents(fs::path(BATON_SOURCE) / "python/baton/torch/__init__.py");  // BATON_TORCH
  all += contents(fs::path(BATON_SOURCE) / ".ci/run");                         // BATON_CI
  all += contents(fs::path(BATON_SOURCE) / "tests/tcp/cut_test.cc");           // BATON_CASES
  for (const base::EnvironmentVariable& row : base::known_environment()) {
    const std::string name(row.name);
    EXPECT_TRUE(all.find(absl::StrCat("\"", name, "\"")) != std::string::npos ||
                all.find(absl::StrCat("${", name)) != std::string::npos)
        << name << " is in the table and is not read anywhere";
  }
}

TEST(Settings, ThePageSaysWhatTheProgramSays) {
  const std::string page = contents(fs::path(BATON_SOURCE) / "docs/settings.md");
  const std::string ours = settings_markdown(settings_info());
  if (linked("shm") && linked("tcp") && linked("ucx") && linked("verbs")) {
    EXPECT_EQ(page, ours) << "baton info --settings --markdown > docs/settings.md";
    return;
  }
  // Built without some provider: what there is must be there.
  size_t at = 0;
  for (size_t end = ours.find('\n'); end != std::string::npos; end = ours.find('\n', at)) {
    EXPECT_THAT(page, HasSubstr(ours.substr(at, end - at)));
    at = end + 1;
  }
}

TEST(Settings, AnUnknownOneOfNoProviderNamesTheProviders) {
  const auto refused = [](const std::string& name) {
    return std::string(check_settings({{name, "1"}}).message());
  };
  EXPECT_THAT(refused("frobnicate.it"),
              AllOf(HasSubstr("this program, which has "), HasSubstr("shm"), HasSubstr("tcp"),
                    HasSubstr("info --settings")));
  EXPECT_THAT(refused("tcp.frobnicate.it"),
              AllOf(Not(HasSubstr("this program")), HasSubstr("info --settings")));
}

TEST(Settings, EveryRowIsWhole) {
  EXPECT_FALSE(known_settings().empty());
  std::set<std::string> seen;
  for (const Setting& row : known_settings()) {
    EXPECT_TRUE(seen.emplace(row.name).second) << row.name << " twice";
    EXPECT_FALSE(row.meaning.empty()) << row.name;
    EXPECT_TRUE(row.check(row.standard).ok()) << row.check(row.standard);
    EXPECT_TRUE(row.kind != Setting::Kind::kNumber || row.least < row.most) << row.name;
    const std::string of(row.name.substr(0, row.name.find('.')));
    EXPECT_TRUE(of == "peer" || of == "staging" || linked(of)) << row.name;
  }
}

TEST(Settings, TextAndJsonHoldTheTable) {
  const Json info = settings_info();
  const std::string text = settings_text(info);
  EXPECT_EQ(info["settings"].size(), known_settings().size());
  for (const Setting& row : known_settings()) EXPECT_THAT(text, HasSubstr(std::string(row.name)));
  for (const base::EnvironmentVariable& row : base::known_environment()) {
    EXPECT_THAT(text, HasSubstr(std::string(row.name)));
  }
}

}  // namespace
}  // namespace baton::bench
