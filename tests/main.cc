// The main() of programs that hold the tests of several files: all of them, or those of some files.
//
//   transport_tests --files=pool_test.cc,sleep_test.cc
//
// A --gtest_filter, which also the children of death tests are given, says itself which tests.
#include <gtest/gtest.h>

#include <cstdio>
#include <string>
#include <string_view>
#include <vector>

namespace {

std::string_view file_name(std::string_view path) { return path.substr(path.rfind('/') + 1); }

constexpr std::string_view kFiles = "--files=";

std::vector<std::string_view> split(std::string_view list) {
  std::vector<std::string_view> parts;
  for (size_t comma = 0; (comma = list.find(',')) != std::string_view::npos;
       list.remove_prefix(comma + 1)) {
    parts.push_back(list.substr(0, comma));
  }
  parts.push_back(list);
  return parts;
}

// A filter for every test of these files; empty when one of them has no test.
std::string tests_of(const std::vector<std::string_view>& files) {
  std::string filter;
  for (const std::string_view file : files) {
    const size_t before = filter.size();
    const auto& all = *testing::UnitTest::GetInstance();
    for (int i = 0; i < all.total_test_suite_count(); ++i) {
      const testing::TestSuite& suite = *all.GetTestSuite(i);
      for (int j = 0; j < suite.total_test_count(); ++j) {
        const testing::TestInfo& test = *suite.GetTestInfo(j);
        if (file_name(test.file()) != file) continue;
        filter += std::string(suite.name()) + "." + test.name() + ":";
      }
    }
    if (filter.size() == before) return "";
  }
  return filter;
}

}  // namespace

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  for (int i = 1; i < argc; ++i) {
    const std::string_view argument = argv[i];
    if (!argument.starts_with(kFiles)) {
      std::fprintf(stderr, "%s: \"%s\" is neither --files= nor an option of GoogleTest\n", argv[0],
                   argv[i]);
      return 2;
    }
    if (GTEST_FLAG_GET(filter) != "*") continue;
    const std::string filter = tests_of(split(argument.substr(kFiles.size())));
    if (filter.empty()) {
      std::fprintf(stderr, "%s: a file of \"%s\" has no test\n", argv[0], argv[i]);
      return 2;
    }
    GTEST_FLAG_SET(filter, filter);
  }
  return RUN_ALL_TESTS();
}
