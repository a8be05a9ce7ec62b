/* wrapper PROGRAM FOLDER ARGUMENT...: appends a line to FOLDER/static-main.of.RANK, and then executes
 * PROGRAM. The wrapper is linked statically, so that no library is loaded into it. */
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

int main(int argc, char **argv)
{
    char path[1200];
    if (argc < 3)
        return 1;
    snprintf(path, sizeof path, "%s/static-main.of.%s", argv[2], getenv("PMI_RANK"));
    FILE *file = fopen(path, "a");
    if (!file || fprintf(file, "begun\n") < 0 || fclose(file))
        return 1;
    execv(argv[1], argv + 1);
    return 1;
}
