#include "runtime/agreement.h"

#include "base/check.h"

namespace ep {
namespace {

std::string value_in(const std::string& line) { return line.substr(line.find('=') + 1); }

void compare(int rank, const std::string& mine, int other_rank, const std::string& theirs, size_t first_asked,
             const std::string& question) {
  std::istringstream my_lines(mine), their_lines(theirs);
  std::string my_line, their_line;
  for (size_t line = 0; std::getline(my_lines, my_line); line++) {
    if (!std::getline(their_lines, their_line)) their_line = "=nothing";
    if (my_line == their_line) continue;
    raise(ErrorKind::kMismatch, "the ranks disagree about ", my_line.substr(0, my_line.find('=')), ": rank ", rank,
          " has ", value_in(my_line), ", rank ", other_rank, " has ", value_in(their_line),
          line < first_asked ? "" : "; " + question);
  }
  if (mine != theirs) {
    raise(ErrorKind::kMismatch, "the ranks disagree about what to compare: rank ", rank, " sent ", mine.size(),
          " bytes, rank ", other_rank, " ", theirs.size());
  }
}

}  // namespace

void Agreement::check(Bootstrap& bootstrap) const {
  const auto all = bootstrap.allgather(text_.str());
  for (size_t r = 0; r < all.size(); r++) {
    compare(bootstrap.rank(), text_.str(), static_cast<int>(r), all[r], first_asked_, question_);
  }
}

}  // namespace ep
